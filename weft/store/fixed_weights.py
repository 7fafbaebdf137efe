"""Settings with which the weights of a running engine can't change, or memory can't sleep."""

from __future__ import annotations

from pathlib import Path

from weft.common.errors import InvalidRequest
from weft.config.resolved import EngineConfig
from weft.config.sizing.tier import levels_of
from weft.store.new_weights import source_files

PARTS = ("weights", "kv_cache")
"""Parts of the memory that sleep and wake, in vLLM's words."""


def why_fixed(config: EngineConfig) -> str:
    """Return the reason why the weights of this engine can't change while the engine runs; "" if they can."""
    if config.transfer.role == "encode" or config.spec.vision is not None:
        return "models that see images take no new weights: embeddings of the old tower would stay in use"
    flag = next((flag for flag, given in levels_of(config.tier) if given is not None), None)
    if flag is not None:
        return f"{flag} keeps blocks of the weights of the start: start the server without {flag}"
    if config.parallel.eplb_interval:
        return "--eplb-interval reads experts from the checkpoint of the start: start without --eplb-interval"
    if config.loaded.quantized is not None and config.loaded.quantized.method == "gguf":
        return "the weights of GGUF files are mapped, and can't change: serve safetensors"
    if config.loaded.implementation == "transformers":
        return "models of the generic backend take no new weights: restart the server with the new weights"
    return ""


def check_sleep(config: EngineConfig, level: int) -> None:
    """Raise InvalidRequest if this engine can't sleep at ``level``: 1 frees the KV cache, 2 also the
    weights."""
    if level not in (1, 2):
        raise InvalidRequest("level must be 1 or 2", param="level")
    if config.device != "cpu":
        raise InvalidRequest("memory of a GPU can't sleep: pause the server, or unload the model")
    if level > 1:
        why = why_fixed(config)
        if config.model.load_format == "dummy":
            why = "random weights are in no file"
        if why:
            raise InvalidRequest(f"level 2 frees the weights, use level 1: {why}", param="level")
        start_files(config)


def start_files(config: EngineConfig) -> tuple[str, ...]:
    """Return the files of the weights of the start. Raises InvalidRequest for other than safetensors."""
    return source_files("file", str(Path(config.model_path).resolve()))
