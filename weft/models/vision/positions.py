"""Learned positions of a square table, interpolated to the grid of an image."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def linear_taps(index: Tensor, size: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 2 entries of ``side`` between which each place of ``size`` lies, ends on ends: [N, 2] and weights.

    index: int64 [N], 0 .. size - 1.
    """
    at = index.to(dtype) * (side - 1) / max(size - 1, 1)
    low = at.floor()
    taps = torch.stack([low, low + 1], dim=1)
    return taps.long().clamp(0, side - 1), 1 - (at.unsqueeze(1) - taps).abs()


def cubic_taps(index: Tensor, size: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 4 entries around each place, middles on middles, those beyond the edge at the edge: likewise.

    Source of the weights: Keys 1981, "Cubic convolution interpolation", with a = -0.75.
    """
    at = (index.to(dtype) + 0.5) * side / size - 0.5
    low = at.floor()
    offsets = torch.arange(-1, 3, device=index.device)
    distance = (at.unsqueeze(1) - low.unsqueeze(1) - offsets).abs()
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return (low.long().unsqueeze(1) + offsets).clamp(0, side - 1), torch.where(distance <= 1, near, far)


def interpolated(
    table: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """[N, hidden] in ``dtype`` (wide): sums of entries of ``table`` [side * side, hidden].

    rows, columns: taps and weights, [N, n] each, of both axes.
    """
    side = round(table.shape[0] ** 0.5)
    taps = (rows[0].unsqueeze(2) * side + columns[0].unsqueeze(1)).flatten(1)
    weights = (rows[1].unsqueeze(2) * columns[1].unsqueeze(1)).flatten(1)
    result = torch.zeros(len(taps), table.shape[1], dtype=dtype, device=table.device)
    for tap in range(taps.shape[1]):  # one by one: all at once take as many times the memory
        result += table[taps[:, tap]].to(dtype) * weights[:, tap : tap + 1]
    return result
