"""Low-rank products on a CPU (csrc/low_rank.cpp), bf16 and float32. Importing registers the op.

A row's sums are float32 in one order for every number of rows, and are added to the row with one rounding.
"""

from __future__ import annotations

import torch

from weft.ops.cpu.served import serve
from weft.ops.low_rank import AdapterRows, LowRankPool

Tensor = torch.Tensor


def low_rank(y: Tensor, x: Tensor, pool: LowRankPool, rows: AdapterRows) -> None:
    """Add the low-rank product of each row to y [T, outputs], in place. See ``weft.ops.low_rank``."""
    run = torch.ops.weft_cpu.low_rank.default
    run(y, x, pool.a, pool.b, rows.numbers, pool.device_ranks, pool.flat_spans)


serve("low_rank", low_rank)
