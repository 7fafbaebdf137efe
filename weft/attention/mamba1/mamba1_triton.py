"""Mamba 1 on CUDA devices by two Triton kernels per segment, for rows of any length.

The kernels (``weft.ops.triton.causal`` and ``weft.ops.triton.mamba``) compute every token in the same order
of operations, so output bits depend neither on the batch nor on chunks. The kernels read no number of the
host, so a decode segment can be captured in a CUDA graph. Triton is imported at the first segment.
"""

from __future__ import annotations

import torch

from weft.attention.mamba1.mamba1_backend import Mamba1Backend, Mamba1Input, Selected
from weft.attention.recurrent import columns_of
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import triton as kernels

Tensor = torch.Tensor


class TritonMamba1(Mamba1Backend):
    """Supports float32, bfloat16 and float16. Stateless, so threads may share an instance."""

    invariant = True
    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError without Triton, and for a model, dtype or device without support."""
        kernels.check_served("Mamba 1 backend 'triton'", dtype, device)
        from weft.ops.triton.mamba import MOST_STATE

        mamba = spec.mamba1
        assert mamba is not None
        if mamba.state > MOST_STATE:
            raise ConfigError(
                f"Mamba 1 backend 'triton' has no states of {mamba.state} elements: at most {MOST_STATE}",
                param="--attention-backend",
            )

    def convolve(self, x: Tensor, out: Tensor, mamba: Mamba1Input) -> None:
        """See ``Mamba1Backend.convolve``. Does nothing without tokens."""
        segment, weights = mamba.segment, mamba.weights
        if not segment.tokens:
            return
        from weft.ops.triton.causal import run

        run(
            x,
            out,
            mamba.state[0],
            weights.taps,
            weights.conv_bias,
            columns_of(segment),
            most=int(segment.host_counts.max()),
            each=mamba.each,
            gated=False,
        )

    def scan(self, inputs: Selected, out: Tensor, mamba: Mamba1Input) -> None:
        """See ``Mamba1Backend.scan``. Does nothing without tokens."""
        segment, weights = mamba.segment, mamba.weights
        if not segment.tokens:
            return
        from weft.ops.triton.mamba import scan

        scan(
            inputs,
            out,
            mamba.state[1],
            (weights.rate, weights.step_bias, weights.skip),
            columns_of(segment),
            each=mamba.each,
        )
