"""Mamba2 of the CPU extension (csrc/mamba.cpp), in bf16 and float32: one call per segment.

The recurrence runs token by token, with one chain of operations per element of the state. So the bits of a
row depend neither on the batch nor on chunking. State and sums are float32.
"""

from __future__ import annotations

import torch

from weft.attention.mamba.mamba_backend import Finish, MambaBackend, MambaInput
from weft.attention.recurrent import tree_sum
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.cpu.served import check_built, check_served, check_taps

Tensor = torch.Tensor

MAX_SIZE = 1024
FINISHES: dict[Finish, int] = {"later": 0, "none": 1, "gated": 2, "normed": 3}
"""Numbers of csrc/mamba.cpp."""


class CpuMamba(MambaBackend):
    """Supports heads and states of up to 1,024. Stateless, so threads may share an instance."""

    invariant = True
    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for an unsupported model, dtype or device, or without the compiled operations."""
        mamba = spec.mamba
        assert mamba is not None
        check_served("Mamba backend 'cpu'", dtype, device)
        if max(mamba.dim, mamba.state) > MAX_SIZE:
            raise ConfigError(
                f"Mamba backend 'cpu' has no heads of {mamba.dim} x {mamba.state}: both sizes may be up to "
                f"{MAX_SIZE}",
                param="--attention-backend",
            )
        check_taps("Mamba backend 'cpu'", mamba.conv)
        check_built("Mamba backend 'cpu'")

    def run(self, zxbcdt: Tensor, out: Tensor, mamba: MambaInput) -> None:
        """Run the compiled operation; see ``MambaBackend.run``. Writes ``out`` and the states in place."""
        segment = mamba.segment
        weights = mamba.weights
        torch.ops.weft_cpu.mamba.default(
            zxbcdt,
            out,
            *mamba.state,
            weights.taps,
            weights.conv_bias,
            weights.rate,
            weights.step_bias,
            weights.skip,
            weights.norm,
            weights.groups,
            weights.norm_groups,
            weights.eps,
            weights.low,
            weights.high,
            FINISHES[weights.finish],
            segment.q_offsets,
            segment.starts,
            segment.slots,
            segment.live,
            mamba.each,
        )

    def sum(self, x: Tensor, dim: int) -> Tensor:
        """Return the sum by a fixed tree of additions."""
        return tree_sum(x, dim)
