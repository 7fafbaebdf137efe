"""Attention backends by name, checked when the model is loaded."""

from __future__ import annotations

import torch

from weft.attention.base import AttentionBackend
from weft.common.errors import ConfigError
from weft.common.registry import Registry
from weft.config.spec import ModelSpec

#: Name to class; ``auto`` takes the first of the device's ``PREFERRED`` that can serve the model.
BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend")
BACKENDS.add("cpu", "weft.attention.cpu_backend:CpuAttention")
BACKENDS.add("torch", "weft.attention.torch_backend:TorchAttention")
BACKENDS.add("invariant", "weft.attention.invariant_backend:InvariantAttention")
BACKENDS.add("triton", "weft.attention.triton_backend:TritonAttention")
BACKENDS.add("triton-invariant", "weft.attention.triton_backend:TritonInvariant")
BACKENDS.add("flashinfer", "weft.attention.flashinfer_backend:FlashInferAttention")

#: By device, the best first. FlashInfer is taken only by name.
PREFERRED = {
    "cpu": ("cpu", "torch", "invariant"),
    "cuda": ("triton", "triton-invariant", "torch"),
}


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
    candidates = PREFERRED.get(device.type, ("torch",)) if name == "auto" else (name,)
    lacking = []
    for candidate in candidates:
        backend = BACKENDS.get(candidate)()
        try:
            if invariant and not backend.invariant:
                raise ConfigError(
                    f"--deterministic: attention backend {candidate!r} has no invariant form; "
                    "what is computed beside a row changes its bits",
                    param="--deterministic",
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
