"""Learned positions of a square table, interpolated to the grid of an image."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def linear_taps(index: Tensor, size: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the 2 table entries around each of ``size`` places, corners aligned: ([N, 2] entries, [N, 2]
    weights).

    index: int64 [N], 0 .. size - 1. ``side``: size of the table.
    """
    at = index.to(dtype) * (side - 1) / max(size - 1, 1)
    low = at.floor()
    taps = torch.stack([low, low + 1], dim=1)
    return taps.long().clamp(0, side - 1), 1 - (at.unsqueeze(1) - taps).abs()


def cubic_taps(index: Tensor, size: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the 4 table entries around each place, centers aligned: ([N, 4] entries, [N, 4] weights).

    Entries beyond the edge are clamped. Arguments as in ``linear_taps``. Source of the weights: Keys 1981,
    "Cubic convolution interpolation", with a = -0.75.
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
    """Return [N, hidden] in ``dtype`` (wide): weighted sums of entries of ``table`` [side * side, hidden].

    rows, columns: taps and weights, [N, n] each, of both axes.
    """
    side = round(table.shape[0] ** 0.5)
    # [N, n * n]: products of row taps and column taps
    taps = (rows[0].unsqueeze(2) * side + columns[0].unsqueeze(1)).flatten(1)
    weights = (rows[1].unsqueeze(2) * columns[1].unsqueeze(1)).flatten(1)
    result = torch.zeros(len(taps), table.shape[1], dtype=dtype, device=table.device)
    for tap in range(taps.shape[1]):  # one by one, because all taps at once would need n * n times the memory
        result += table[taps[:, tap]].to(dtype) * weights[:, tap : tap + 1]
    return result
