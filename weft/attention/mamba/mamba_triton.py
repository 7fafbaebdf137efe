"""Mamba2 on CUDA devices by two Triton kernels per segment (``weft.ops.triton.mamba``).

    TritonMamba            rows of few tokens by the kernels; longer rows by torch, in chunks
    TritonInvariantMamba   every row by the kernels; output bits depend neither on the batch nor on chunks

The kernels read no number of the host, so a decode segment can be captured in a CUDA graph. Triton is
imported at the first segment.
"""

from __future__ import annotations

import torch

from weft.attention.mamba.mamba_backend import MambaInput
from weft.attention.mamba.mamba_torch import TorchMamba
from weft.attention.recurrent import KernelRows, columns_of, tree_sum
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import triton as kernels

Tensor = torch.Tensor


class TritonMamba(KernelRows, TorchMamba):
    """Supports float32, bfloat16 and float16. Stateless, so threads may share an instance."""

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError without Triton, and for a model, dtype or device without support."""
        kernels.check_served("Mamba backend 'triton'", dtype, device)
        from weft.ops.triton.mamba import MOST_STATE, MOST_TAPS

        mamba = spec.mamba
        assert mamba is not None
        if mamba.state > MOST_STATE or mamba.conv > MOST_TAPS:
            raise ConfigError(
                f"Mamba backend 'triton' has no states of {mamba.state} columns with {mamba.conv} taps: "
                f"at most {MOST_STATE} columns and {MOST_TAPS} taps",
                param="--attention-backend",
            )

    def run(self, zxbcdt: Tensor, out: Tensor, mamba: MambaInput) -> None:
        """See ``MambaBackend.run``. Writes ``out`` and the states in place."""
        segment, weights = mamba.segment, mamba.weights
        if not self.by_kernels(segment):
            super().run(zxbcdt, out, mamba)
            return
        if not segment.tokens:
            return
        from weft.ops.triton.mamba import run

        of_heads = (weights.rate, weights.step_bias, weights.skip)
        run(
            zxbcdt,
            out,
            mamba.state,
            (weights.taps, weights.conv_bias, *of_heads, weights.norm),
            columns_of(segment),
            groups=weights.groups,
            norm_groups=weights.norm_groups,
            bounds=(weights.low, weights.high),
            eps=weights.eps,
            finish=weights.finish,
            each=mamba.each,
        )


class TritonInvariantMamba(TritonMamba):
    """``TritonMamba`` with the kernels for every row."""

    invariant = True

    def sum(self, x: Tensor, dim: int) -> Tensor:
        return tree_sum(x, dim)
