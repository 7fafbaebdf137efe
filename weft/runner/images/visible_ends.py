"""Tokens of an image that attend to later tokens of the image: ends of visible positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.ops.upload import upload

Tensor = torch.Tensor


class ImagesOfRow(NamedTuple):
    """The images of a prefill row over positions ``start`` .. ``end - 1``."""

    start: int
    end: int
    images: Sequence[tuple[int, int]]
    """(first position, number of tokens) of each image."""


def ends_of(
    rows: Iterable[ImagesOfRow], ahead: Sequence[int], groups: int, device: torch.device
) -> tuple[Tensor | None, ...]:
    """Return ``SegmentInput.ends`` of a prefill segment.

    ``ahead``: KV cache groups with tokens of an image that attend to later tokens; ``groups``: number of all
    groups. No end lies behind the row, so a row that ends within an image reads written entries only.
    """
    columns = []
    found = False
    for row in rows:
        column = np.zeros(row.end - row.start, np.int64)
        for first, count in row.images:
            low, high = max(first, row.start), min(first + count, row.end)
            if low < high:
                column[low - row.start : high - row.start] = high
                found = True
        columns.append(column)
    if not ahead or not found:
        return ()
    ends = upload(np.concatenate(columns), device)
    return tuple(ends if group in ahead else None for group in range(groups))
