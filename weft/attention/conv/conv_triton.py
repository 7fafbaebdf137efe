"""Gated short convolution on CUDA devices by one Triton kernel per segment, for rows of any length.

The kernel (``weft.ops.triton.causal``) computes every token in the same order of operations, so output bits
depend neither on the batch nor on chunks. The kernel reads no number of the host, so a decode segment can be
captured in a CUDA graph. Triton is imported at the first segment.
"""

from __future__ import annotations

import torch

from weft.attention.conv.conv_backend import ConvBackend, ConvInput
from weft.attention.recurrent import columns_of
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import triton as kernels

Tensor = torch.Tensor


class TritonConv(ConvBackend):
    """Supports float32, bfloat16 and float16. Stateless, so threads may share an instance."""

    invariant = True
    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError without Triton, and for a dtype or device without support."""
        kernels.check_served("short convolution backend 'triton'", dtype, device)

    def run(self, bcx: Tensor, out: Tensor, conv: ConvInput) -> None:
        """See ``ConvBackend.run``. Writes ``out`` and the states in place; does nothing without tokens."""
        segment, weights = conv.segment, conv.weights
        if not segment.tokens:
            return
        from weft.ops.triton.causal import run

        run(
            bcx,
            out,
            conv.state[0],
            weights.taps,
            weights.bias,
            columns_of(segment),
            most=int(segment.host_counts.max()),
            each=conv.each,
        )
