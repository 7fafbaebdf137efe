"""Attention backends by name, checked when the model is loaded."""

from __future__ import annotations

import torch

from weft.attention.base import AttentionBackend
from weft.common.errors import ConfigError
from weft.common.registry import Registry
from weft.config.spec import ModelSpec

#: Name to class; ``auto`` takes the first of ``PREFERRED`` that can serve the model.
BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend")
BACKENDS.add("cpu", "weft.attention.cpu_backend:CpuAttention")
BACKENDS.add("torch", "weft.attention.torch_backend:TorchAttention")

PREFERRED = ("torch",)  # becomes cpu, torch


def choose(
    name: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    *,
    invariant: bool = False,
) -> AttentionBackend:
    """The backend called ``name`` (or the best that fits, for ``auto``), checked against every cache kind.

    ``invariant`` demands that capability.

    Raises ConfigError that names the backend and what it lacks, or lists the backends there are.
    """
    candidates = PREFERRED if name == "auto" else (name,)
    lacking = []
    for candidate in candidates:
        backend = BACKENDS.get(candidate)()
        try:
            if invariant and not backend.invariant:
                raise ConfigError(
                    f"attention backend {candidate!r} depends on what is computed beside a row",
                    param="--attention-backend",
                )
            for cache in spec.caches:
                backend.check(cache, spec.heads, block_size, dtype, device)
        except ConfigError as error:
            if name != "auto":
                raise
            lacking.append(error.message)
            continue
        return backend
    raise ConfigError(
        f"no attention backend can serve this model: {'; '.join(lacking)}", param="--attention-backend"
    )
