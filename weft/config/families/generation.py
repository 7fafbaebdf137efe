"""Fields of ``generation_config.json``: ends of texts, and defaults of sampling parameters."""

from __future__ import annotations

from pathlib import Path

from weft.common.errors import ConfigError, InvalidRequest
from weft.common.folder import expanded
from weft.common.log import get_logger
from weft.config.families.facts import Facts, read_json
from weft.types.sampling import SamplingParams

log = get_logger(__name__)

FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that are defaults of requests, as in vLLM. ``do_sample`` and ``max_new_tokens`` are not read."""
AUTO, NONE = "auto", "none"
"""Values of --generation-config that are no folders."""


def generation_ends(folder: Path) -> tuple[int, ...]:
    """Return the end ids in the file of ``folder``; () without the file. Raise ConfigError."""
    config = read_json(folder, FILE)
    return () if config is None else Facts(config, file=FILE).integers("eos_token_id")


def check_generation_config(setting: str) -> None:
    """Raise ConfigError unless ``setting`` is a valid value of --generation-config."""
    if setting not in (AUTO, NONE) and not expanded(setting).joinpath(FILE).is_file():
        flag = "--generation-config"
        raise ConfigError(f"{flag} must be auto, none, or a folder with {FILE}", param=flag)


def sampling_defaults(folder: Path, setting: str = AUTO) -> dict[str, int | float]:
    """Return the sampling parameters that apply to requests without their own values.

    ``folder``: of the model. ``setting``: --generation-config. A value out of range is logged and left out.
    {} without the file. Raise ConfigError for a broken file, and the error of ``check_generation_config``.
    """
    check_generation_config(setting)
    if setting == NONE:
        return {}
    config = read_json(folder if setting == AUTO else expanded(setting), FILE) or {}
    found: dict[str, int | float] = {}
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
