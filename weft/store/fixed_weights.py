"""Checks of a sleep (freed KV caches and weights), and the files from which the weights are read again."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from weft.common.errors import InvalidRequest
from weft.config.resolved import EngineConfig
from weft.store.new_weights import source_files
from weft.types.weights import WeightsUpdate

PARTS = ("weights", "kv_cache")
"""Parts of the memory that sleep and wake, in vLLM's words."""


def check_sleep(config: EngineConfig, level: int) -> None:
    """Raise InvalidRequest if this engine can't sleep at ``level``: 1 frees the KV cache, 2 also the
    weights."""
    if level not in (1, 2):
        raise InvalidRequest("level must be 1 or 2", param="level")
    if config.device != "cpu":
        raise InvalidRequest("sleep is not supported on a GPU: pause the server, or unload the model")
    if level > 1:
        if config.model.load_format == "dummy":
            raise InvalidRequest(
                "level 2 frees the weights, and random weights (--load-format dummy) cannot be read again: "
                "use level 1",
                param="level",
            )
        start_files(config)


def check_parts(parts: Collection[str]) -> None:
    """Raise InvalidRequest for a name that is not in ``PARTS``."""
    if any(part not in PARTS for part in parts):
        raise InvalidRequest(f"tags must be among {', '.join(PARTS)}", param="tags")


def former_updates(config: EngineConfig, history: tuple[WeightsUpdate, ...]) -> tuple[WeightsUpdate, ...]:
    """Return the updates that restore the weights in use, in order. The first update is complete.

    ``history``: the updates since the last complete update. Raises InvalidRequest if the weights of the start
    are pickles.
    """
    if history and not history[0].partial:
        return history
    return (WeightsUpdate(version=0, files=start_files(config)), *history)


def start_files(config: EngineConfig) -> tuple[str, ...]:
    """Return the files of the weights of the start. Raises InvalidRequest for pickles."""
    return source_files("file", str(Path(config.model_path).absolute()))
