"""Gated delta net of the CPU extension (csrc/delta.cpp), in bf16 and float32: one call per segment.

The recurrence runs token by token, with one chain of operations per element of the state. So the bits of a
row depend neither on the batch nor on chunking. State and sums are float32.
"""

from __future__ import annotations

import torch

from weft.attention.delta.delta_backend import DeltaBackend, DeltaInput, DeltaInputs
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.cpu.served import check_built, check_served, check_taps

Tensor = torch.Tensor

MAX_DIM = 256


class CpuDelta(DeltaBackend):
    """Supports heads of multiples of 16 up to 256 dims. Stateless, so threads may share an instance."""

    invariant = True
    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for an unsupported model, dtype or device, or without the compiled operations."""
        delta = spec.delta
        assert delta is not None
        check_served("delta net backend 'cpu'", dtype, device)
        for dim in (delta.k_dim, delta.v_dim):
            if dim % 16 or dim > MAX_DIM:
                raise ConfigError(
                    f"delta net backend 'cpu' has no heads of {dim}: it needs a multiple of 16 up to "
                    f"{MAX_DIM}",
                    param="--attention-backend",
                )
        check_taps("delta net backend 'cpu'", delta.conv)
        check_built("delta net backend 'cpu'")

    def run(self, inputs: DeltaInputs, out: Tensor, delta: DeltaInput) -> None:
        """Run the compiled operation; see ``DeltaBackend.run``. Writes ``out`` and the states in place."""
        segment = delta.segment
        weights = delta.weights
        torch.ops.weft_cpu.delta_net.default(
            *inputs,
            out,
            *delta.state,
            weights.taps,
            weights.rate,
            weights.bias,
            weights.norm,
            weights.eps,
            weights.reach,
            weights.floor,
            weights.sigmoid,
            segment.q_offsets,
            segment.starts,
            segment.slots,
            segment.live,
            delta.each,
        )
