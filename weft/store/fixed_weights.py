"""Settings with which the weights of a running engine can't change."""

from __future__ import annotations

from weft.config.resolved import EngineConfig


def why_fixed(config: EngineConfig) -> str:
    """Return the reason why the weights of this engine can't change while the engine runs; "" if they can."""
    if config.transfer.role == "encode" or config.spec.vision is not None:
        return "models that see images take no new weights: embeddings of the old tower would stay in use"
    if config.tier.kv_disk is not None:
        return "--kv-disk names blocks by the weights of the start: start the server without --kv-disk"
    if config.parallel.eplb_interval:
        return "--eplb-interval reads experts from the checkpoint of the start: start without --eplb-interval"
    if config.loaded.quantized is not None and config.loaded.quantized.method == "gguf":
        return "the weights of GGUF files are mapped, and can't change: serve safetensors"
    if config.loaded.implementation == "transformers":
        return "models of the generic backend take no new weights: restart the server with the new weights"
    return ""
