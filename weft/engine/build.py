"""From a resolved configuration to a runner: weights, attention backend, caches, slot state."""

from __future__ import annotations

import torch

from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.config.resolved import EngineConfig
from weft.models.loader import load_model
from weft.runner.runner import Runner
from weft.runner.trace import StepTrace

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_runner(config: EngineConfig, *, progress: bool = True, poison: bool = False) -> Runner:
    """Loads the model and preallocates everything a step needs.

    Raises ConfigError, before weights are read, when there is no device or no backend for the model.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no GPU; use --device cpu", param="device")
    device, dtype, spec = torch.device(config.device), DTYPES[config.dtype], config.spec
    backend = choose(config.runner.attention_backend, spec, dtype, device, config.kv.block_size)
    trace = StepTrace(config.runner.trace) if config.runner.trace else None
    model = load_model(
        config.model_path, spec, dtype, device, config.model.load_format, config.model.seed or 0, progress
    )
    return Runner(
        model,
        backend,
        config.kv,
        vocab_size=spec.vocab_size,
        dtype=dtype,
        device=device,
        depth=config.scheduler.steps_in_flight,
        trace=trace,
        poison=poison,
    )
