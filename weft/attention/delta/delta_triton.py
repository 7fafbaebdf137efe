"""Gated delta net on CUDA devices by two Triton kernels per segment (``weft.ops.triton.delta``).

    TritonDelta            rows of few tokens by the kernels; longer rows by torch, in chunks
    TritonInvariantDelta   every row by the kernels; output bits depend neither on the batch nor on chunks

The kernels read no number of the host, so a decode segment can be captured in a CUDA graph. Triton is
imported at the first segment.
"""

from __future__ import annotations

import torch

from weft.attention.delta.delta_backend import DeltaInput, DeltaInputs
from weft.attention.delta.delta_torch import LENGTH_EPS, TorchDelta
from weft.attention.recurrent import KernelRows, columns_of
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import triton as kernels

Tensor = torch.Tensor


class TritonDelta(KernelRows, TorchDelta):
    """Supports float32, bfloat16 and float16. Stateless, so threads may share an instance."""

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError without Triton, and for a model, dtype or device without support."""
        kernels.check_served("delta net backend 'triton'", dtype, device)
        from weft.ops.triton.delta import fits

        delta = spec.delta
        assert delta is not None
        if not fits(delta.k_dim, delta.v_dim):
            raise ConfigError(
                f"delta net backend 'triton' has no heads of {delta.k_dim} x {delta.v_dim}: "
                "at most 256 x 1024",
                param="--attention-backend",
            )

    def run(self, inputs: DeltaInputs, out: Tensor, delta: DeltaInput) -> None:
        """See ``DeltaBackend.run``. Writes ``out`` and the states in place."""
        segment, weights = delta.segment, delta.weights
        if not self.by_kernels(segment):
            super().run(inputs, out, delta)
            return
        if not segment.tokens:
            return
        from weft.ops.triton.delta import run

        run(
            inputs,
            out,
            delta.state,
            (weights.taps, weights.rate, weights.bias, weights.norm),
            columns_of(segment),
            eps=weights.eps,
            length_eps=LENGTH_EPS,
            reach=weights.reach,
            floor=weights.floor,
            sigmoid=weights.sigmoid,
            each=delta.each,
        )


class TritonInvariantDelta(TritonDelta):
    """``TritonDelta`` with the kernels for every row."""

    invariant = True
