"""Copies of recurrent states that a step may write, for the tests of all state mixers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def check_written(scene: Any, counts: Sequence[int], each: bool) -> None:
    """Assert that a step wrote the copies of its rows whole, and nothing else.

    ``scene``: states that were NaN before the step, and rows with slots. ``counts``: tokens of each row.
    ``each``: a row writes a copy for each token, otherwise one.
    """
    for part in scene.state:
        written = ~part.isnan().flatten(2).all(2)
        right = torch.zeros_like(written)
        for row, count in zip(scene.rows, counts, strict=True):
            right[row.slot, : count if each else 1] = True
        assert torch.equal(written, right)
        assert not part[written].isnan().any()
