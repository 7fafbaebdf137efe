"""Registry of core attention backends by form and name. Backends are checked when the model is loaded."""

from __future__ import annotations

from typing import Any

import torch

from weft.attention.base import AttentionBackend, Backend, Backends
from weft.attention.mla.latent import LatentBackend
from weft.attention.sparse.sparse import SparseBackend
from weft.common.errors import ConfigError
from weft.common.registry import Registry
from weft.config.sizing.draft import owner_of
from weft.config.spec import ModelSpec

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend")
BACKENDS.add("cpu", "weft.attention.gqa.cpu_backend:CpuAttention")
BACKENDS.add("torch", "weft.attention.gqa.torch_backend:TorchAttention")
BACKENDS.add("invariant", "weft.attention.gqa.invariant_backend:InvariantAttention")
BACKENDS.add("triton", "weft.attention.gqa.triton_backend:TritonAttention")
BACKENDS.add("triton-invariant", "weft.attention.gqa.triton_backend:TritonInvariant")
BACKENDS.add("flashinfer", "weft.attention.gqa.flashinfer_backend:FlashInferAttention")

SPARSE: Registry[type[SparseBackend]] = Registry("attention backend")
SPARSE.add("cpu", "weft.attention.sparse.sparse_cpu:CpuSparse")
SPARSE.add("torch", "weft.attention.sparse.sparse_torch:TorchSparse")
SPARSE.add("triton", "weft.attention.sparse.sparse_triton:TritonSparse")
SPARSE.add("triton-invariant", "weft.attention.sparse.sparse_triton:TritonInvariantSparse")

LATENT: Registry[type[LatentBackend]] = Registry("attention backend")
LATENT.add("cpu", "weft.attention.mla.latent_cpu:CpuLatent")
LATENT.add("torch", "weft.attention.mla.latent_torch:TorchLatent")
LATENT.add("triton", "weft.attention.mla.latent_triton:TritonLatent")
LATENT.add("invariant", "weft.attention.mla.latent_invariant:InvariantLatent")

DELTA: Registry[type[Backend]] = Registry("delta net backend")
DELTA.add("cpu", "weft.attention.delta.delta_cpu:CpuDelta")
DELTA.add("torch", "weft.attention.delta.delta_torch:TorchDelta")
DELTA.add("triton", "weft.attention.delta.delta_triton:TritonDelta")
DELTA.add("triton-invariant", "weft.attention.delta.delta_triton:TritonInvariantDelta")
DELTA.add("invariant", "weft.attention.delta.delta_torch:InvariantDelta")

CONV: Registry[type[Backend]] = Registry("short convolution backend")
CONV.add("torch", "weft.attention.conv.conv_torch:TorchConv")
CONV.add("triton", "weft.attention.conv.conv_triton:TritonConv")

MAMBA: Registry[type[Backend]] = Registry("Mamba backend")
MAMBA.add("cpu", "weft.attention.mamba.mamba_cpu:CpuMamba")
MAMBA.add("torch", "weft.attention.mamba.mamba_torch:TorchMamba")
MAMBA.add("triton", "weft.attention.mamba.mamba_triton:TritonMamba")
MAMBA.add("triton-invariant", "weft.attention.mamba.mamba_triton:TritonInvariantMamba")
MAMBA.add("invariant", "weft.attention.mamba.mamba_torch:InvariantMamba")

MAMBA1: Registry[type[Backend]] = Registry("Mamba 1 backend")
MAMBA1.add("cpu", "weft.attention.mamba1.mamba1_cpu:CpuMamba1")
MAMBA1.add("torch", "weft.attention.mamba1.mamba1_torch:TorchMamba1")
MAMBA1.add("triton", "weft.attention.mamba1.mamba1_triton:TritonMamba1")

#: Backends of each form, by name.
FORMS: dict[str, Registry[Any]] = {
    "gqa": BACKENDS,
    "latent": LATENT,
    "delta": DELTA,
    "sparse": SPARSE,
    "conv": CONV,
    "mamba": MAMBA,
    "mamba1": MAMBA1,
}

#: Names per form and device, in order of preference. ``auto`` takes the first backend that can serve the
#: model. FlashInfer is used only by name.
PREFERRED: dict[str, dict[str, tuple[str, ...]]] = {
    "gqa": {
        "cpu": ("cpu", "torch", "invariant"),
        "cuda": ("triton", "triton-invariant", "torch"),
    },
    "latent": {"cpu": ("cpu", "torch", "invariant"), "cuda": ("triton", "torch")},
    "delta": {
        "cpu": ("cpu", "torch", "invariant"),
        "cuda": ("triton", "triton-invariant", "torch", "invariant"),
    },
    "sparse": {"cpu": ("cpu", "torch"), "cuda": ("triton", "triton-invariant", "torch")},
    "conv": {"cpu": ("torch",), "cuda": ("triton", "torch")},
    "mamba": {
        "cpu": ("cpu", "torch", "invariant"),
        "cuda": ("triton", "triton-invariant", "torch", "invariant"),
    },
    "mamba1": {"cpu": ("cpu", "torch"), "cuda": ("triton", "torch")},
}


def choose(
    name: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    *,
    invariant: bool = False,
) -> Backends:
    """Return a backend for each form of the model, checked against every KV cache group of the form.

    Forms without a backend called ``name``, and all forms for ``auto``, get the first suitable backend of
    ``PREFERRED``. ``invariant``: accept invariant backends only. Raises ConfigError: an unknown name lists
    the available backends; an unsuitable backend is named with the missing feature.
    """
    forms = spec.forms
    if name != "auto" and not any(name in FORMS[form] for form in forms):
        FORMS[forms[0]].get(name)  # raises, and lists the available names
    return Backends(
        _choose(form, name if name in FORMS[form] else "auto", spec, dtype, device, block_size, invariant)
        for form in forms
    )


def _choose(
    form: str,
    name: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    invariant: bool,
) -> Backend:
    """Return the first candidate that passes all checks of ``form``.

    Raises ConfigError: with the first problem for a named backend, with all problems for ``auto``.
    """
    # With a name there is one candidate, and its first problem is the error. With ``auto``, collect the
    # problems of all candidates.
    candidates = PREFERRED[form].get(device.type, ("torch",)) if name == "auto" else (name,)
    lacking = []
    for candidate in candidates:
        backend: Backend = FORMS[form].get(candidate)()
        try:
            if invariant and not backend.invariant:
                raise ConfigError(
                    f"--deterministic: attention backend {candidate!r} has no invariant form; "
                    "what is computed beside a row changes its bits",
                    param="--deterministic",
                )
            for cache in spec.caches:
                if cache.form == form:
                    backend.check(cache, owner_of(cache, spec), block_size, dtype, device)
        except ConfigError as error:
            if name != "auto":
                hint = f"{error.message}; or use --attention-backend auto"
                raise ConfigError(hint, param=error.param) from error
            lacking.append(error.message)
            continue
        return backend
    raise ConfigError(
        f"no attention backend can serve this model: {'; '.join(lacking)}", param="--attention-backend"
    )
