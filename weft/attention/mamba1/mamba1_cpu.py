"""Mamba 1 of the CPU extension (csrc/mamba1.cpp), in bf16 and float32: two calls per segment.

The recurrence runs token by token, with one chain of operations per element of the state. So the bits of a
row depend neither on the batch nor on chunking. State and sums are float32.
"""

from __future__ import annotations

import torch

from weft.attention.mamba1.mamba1_backend import Mamba1Backend, Mamba1Input, Selected
from weft.attention.recurrent import columns_of
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.cpu.served import check_built, check_served, check_taps

Tensor = torch.Tensor


class CpuMamba1(Mamba1Backend):
    """Supports states of any size. Stateless, so threads may share an instance."""

    invariant = True
    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for an unsupported model, dtype or device, or without the compiled operations."""
        mamba = spec.mamba1
        assert mamba is not None
        check_served("Mamba 1 backend 'cpu'", dtype, device)
        check_taps("Mamba 1 backend 'cpu'", mamba.conv)
        check_built("Mamba 1 backend 'cpu'")

    def convolve(self, x: Tensor, out: Tensor, mamba: Mamba1Input) -> None:
        """Run the compiled operation; see ``Mamba1Backend.convolve``. Writes ``out`` and the inputs kept."""
        weights = mamba.weights
        torch.ops.weft_cpu.mamba1_convolve.default(
            x, out, mamba.state[0], weights.taps, weights.conv_bias, *columns_of(mamba.segment), mamba.each
        )

    def scan(self, inputs: Selected, out: Tensor, mamba: Mamba1Input) -> None:
        """Run the compiled operation; see ``Mamba1Backend.scan``. Writes ``out`` and the states in place."""
        weights = mamba.weights
        torch.ops.weft_cpu.mamba1_scan.default(
            *inputs,
            out,
            mamba.state[1],
            weights.rate,
            weights.step_bias,
            weights.skip,
            *columns_of(mamba.segment),
            mamba.each,
        )
