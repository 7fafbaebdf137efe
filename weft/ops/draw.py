"""Draws of tokens on a GPU by Triton kernels (weft/ops/triton/draw.py). The first draw imports Triton."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch

from weft.ops.sampling import Columns
from weft.ops.triton import DTYPES, available

Tensor = torch.Tensor

DRAWS = -1
"""Content of ``Advance.flag`` in a captured step that draws its tokens. Slots are never negative."""


class Advance(NamedTuple):
    """Tensors of the slots that a captured step writes, see ``SlotState``."""

    flag: Tensor
    """int64 [1], read on the device. ``DRAWS``: the step draws. Any other value: nothing changes."""
    spare: int
    """Slot of padding rows, which draw nothing."""
    history: Tensor
    num_computed: Tensor
    live: Tensor | None
    """None if slots have no recurrent state."""


def serves(logits: Tensor) -> bool:
    """Return True if ``draw`` accepts these logits."""
    return logits.device.type == "cuda" and logits.dtype in DTYPES and available()


def draw(
    logits: Tensor,
    vocab_size: int,
    slots: Tensor,
    table: Tensor,
    columns: Columns,
    rows: Tensor | None = None,
    positions: Tensor | None = None,
    advance: Advance | None = None,
) -> Tensor:
    """Return the token of each row, -1 for a row with NaN or +inf or without a finite value: int64 [R].

    logits: [L, >= vocab_size] in float32, bfloat16 or float16, with contiguous rows. slots: int64 [R]. table:
    int64 [slots, columns], contiguous. Row r is drawn from ``logits[rows[r]]`` (default: ``logits[r]``) at
    ``positions[r]``; both int64 [R]. With ``advance``, row r is drawn from ``logits[r]`` at the next position
    of its slot, the token is written there, and the slot advances. The host does not wait.
    """
    if advance is None:
        if rows is None:
            rows = torch.arange(len(slots), device=logits.device)
        assert positions is not None, "rows have positions, or advance"
    kernels = importlib.import_module("weft.ops.triton.draw")
    drawn: Tensor = kernels.draw(logits, vocab_size, slots, table, columns, rows, positions, advance)
    return drawn
