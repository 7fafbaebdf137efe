"""Part of a global parameter stored by one rank.

Weight maps refer to whole parameters. A layer allocates the rank's part and notes the part
(``weft.layers.pending_codes.Note``); the loader reads nothing else.

    global rows     | gate 0 | gate 1 | up 0 | up 1 |
    rank 1                   | gate 1 |      | up 1 |      spans, one after another in the local parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranges of one dim of a global parameter. Other dims are whole."""

    spans: tuple[tuple[int, int], ...]
    """Half-open ranges, one after another in the local parameter. Local entries beyond are zero."""
    size: int
    """Size of the global dim."""
    dim: int = 0

    @property
    def count(self) -> int:
        """Number of entries in all spans."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def whole(self) -> bool:
        """True if the local dim equals the global dim."""
        return self.spans == ((0, self.size),)

    def times(self, each: int) -> Shard:
        """Return the shard of a dim with ``each`` entries for every present entry."""
        return replace(self, spans=tuple((b * each, e * each) for b, e in self.spans), size=self.size * each)

    def at(self, dim: int) -> Shard:
        """Return the same shard along another dim."""
        return replace(self, dim=dim)


def whole(size: int) -> Shard:
    """Return the shard with all of ``size`` entries."""
    return Shard(((0, size),), size)


def picked(entries: Sequence[int], size: int) -> Shard:
    """Return the shard of single ``entries`` of a dim, in any order."""
    return joined_spans(((entry, entry + 1) for entry in entries), size)


def joined(*parts: Shard) -> Shard:
    """Return the shard of the concatenation of the parameters of ``parts``."""
    spans = list[tuple[int, int]]()
    size = 0
    for part in parts:
        spans += [(size + begin, size + end) for begin, end in part.spans if begin < end]
        size += part.size
    return joined_spans(spans, size)


def joined_spans(spans: Iterable[tuple[int, int]], size: int) -> Shard:
    """Return the shard of ``spans`` in order, with adjacent spans merged."""
    merged = list[tuple[int, int]]()
    for begin, end in spans:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return Shard(tuple(merged) or ((0, 0),), size)


def cut(values: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return the part ``shard`` of a whole parameter's values."""
    return torch.cat([values.narrow(shard.dim, begin, end - begin) for begin, end in shard.spans], shard.dim)
