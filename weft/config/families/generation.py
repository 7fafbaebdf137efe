"""Fields of ``generation_config.json``: ends of texts, and defaults of sampling parameters."""

from __future__ import annotations

from pathlib import Path

from weft.common.errors import InvalidRequest
from weft.common.log import get_logger
from weft.config.families.facts import Facts, read_json
from weft.types.sampling import SamplingParams

log = get_logger(__name__)

FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that are defaults of requests, as in vLLM. ``do_sample`` has no effect there, either."""


def generation_ends(folder: Path) -> tuple[int, ...]:
    """Return the end ids in the file of ``folder``; () without the file. Raise ConfigError."""
    config = read_json(folder, FILE)
    return () if config is None else Facts(config, file=FILE).integers("eos_token_id")


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters of requests that set no own: the values in the file of ``folder``.

    A value out of range is logged and left out. {} without the file. Raise ConfigError for a broken file.
    """
    config = read_json(folder, FILE) or {}
    found: dict[str, float] = {}
    for name in _SAMPLING:
        if (value := config.get(name)) is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            log.warning("%s: %s; the value is left out", FILE, error.message)
        else:
            found[name] = value
    return found
