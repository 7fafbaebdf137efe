"""Part of a global parameter stored by one rank.

Weight maps refer to whole parameters. A layer allocates the rank's part and notes the
part on the parameter; the loader reads nothing else.

    global rows     | gate 0 | gate 1 | up 0 | up 1 |
    rank 1                   | gate 1 |      | up 1 |      spans, one after another in the local parameter
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from weft.ops.coded import Codes


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


def mark(parameter: torch.nn.Parameter, shard: Shard) -> None:
    """Note ``shard`` on ``parameter``."""
    parameter.shard = shard  # type: ignore[attr-defined]


def shard_of(parameter: torch.nn.Parameter) -> Shard | None:
    """Return the shard of ``parameter``; None if ``parameter`` is the whole global parameter."""
    result: Shard | None = getattr(parameter, "shard", None)
    return result


def keep_largest(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Have the loader note, in ``dtype``, the largest magnitude of each whole row of ``parameter``.

    For weights with cut rows that are rounded to a scale per row: all ranks use the same scale.
    """
    shape = (*parameter.shape[:-1], 1)
    parameter.largest = torch.zeros(shape, dtype=dtype, device=parameter.device)  # type: ignore[attr-defined]


def round_whole(parameter: torch.nn.Parameter, rounds: Callable[[torch.Tensor], Codes]) -> None:
    """Have the loader round whole rows of ``parameter`` with ``rounds`` before cutting the rank's part.

    For weights with cut rows that are rounded to scales of groups: all ranks use the same groups.
    """
    parameter.rounds = rounds  # type: ignore[attr-defined]


def rounding_of(parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], Codes] | None:
    """Return the function of ``round_whole``; None if rows may be rounded after the cut."""
    result: Callable[[torch.Tensor], Codes] | None = getattr(parameter, "rounds", None)
    return result


def largest_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the largest magnitudes [..., 1] of the whole rows of ``parameter``; None if not noted."""
    result: torch.Tensor | None = getattr(parameter, "largest", None)
    return result


def global_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the global parameter of ``parameter``."""
    shape = list(parameter.shape)
    shard = shard_of(parameter)
    if shard is not None:
        shape[shard.dim] = shard.size
    return tuple(shape)


def cut(values: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return the part ``shard`` of a whole parameter's values."""
    return torch.cat([values.narrow(shard.dim, begin, end - begin) for begin, end in shard.spans], shard.dim)
