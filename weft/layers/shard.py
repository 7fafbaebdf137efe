"""Which part of a global parameter a rank's own is.

Weight maps speak of whole parameters. A layer makes what its rank needs of them, and says what that is; the
loader reads no more than that.

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
    """Half open, one after another in the local parameter. What that has beyond them is padding, zero."""
    size: int
    """Of the global dim."""
    dim: int = 0

    @property
    def count(self) -> int:
        """Entries of all spans."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def whole(self) -> bool:
        """Whether the local dim is the global one."""
        return self.spans == ((0, self.size),)

    def times(self, each: int) -> Shard:
        """The shard of a dim in which each entry of this one has ``each`` entries."""
        return replace(self, spans=tuple((b * each, e * each) for b, e in self.spans), size=self.size * each)

    def at(self, dim: int) -> Shard:
        """This shard along another dim."""
        return replace(self, dim=dim)


def whole(size: int) -> Shard:
    """All of ``size``."""
    return Shard(((0, size),), size)


def picked(entries: Sequence[int], size: int) -> Shard:
    """Single ``entries`` of a dim, in any order."""
    return joined_spans(((entry, entry + 1) for entry in entries), size)


def joined(*parts: Shard) -> Shard:
    """Parts of parameters that lie one after another in one."""
    spans = list[tuple[int, int]]()
    size = 0
    for part in parts:
        spans += [(size + begin, size + end) for begin, end in part.spans if begin < end]
        size += part.size
    return joined_spans(spans, size)


def joined_spans(spans: Iterable[tuple[int, int]], size: int) -> Shard:
    """``spans`` one after another, neighbours as one."""
    merged = list[tuple[int, int]]()
    for begin, end in spans:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return Shard(tuple(merged) or ((0, 0),), size)


def mark(parameter: torch.nn.Parameter, shard: Shard) -> None:
    """Notes on ``parameter`` what it holds."""
    parameter.shard = shard  # type: ignore[attr-defined]


def shard_of(parameter: torch.nn.Parameter) -> Shard | None:
    """What ``parameter`` holds; None for all of the global one."""
    result: Shard | None = getattr(parameter, "shard", None)
    return result


def keep_largest(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Has the loader note, in ``dtype``, the largest magnitude of each whole row of ``parameter``.

    For weights whose rows are cut and then rounded to a scale of the row: all ranks take the same.
    """
    shape = (*parameter.shape[:-1], 1)
    parameter.largest = torch.zeros(shape, dtype=dtype, device=parameter.device)  # type: ignore[attr-defined]


def round_whole(parameter: torch.nn.Parameter, rounds: Callable[[torch.Tensor], Codes]) -> None:
    """Has the loader round whole rows of ``parameter``, before it takes what this rank has of them.

    For weights whose rows are cut and then rounded to scales of groups: all ranks have the same groups.
    """
    parameter.rounds = rounds  # type: ignore[attr-defined]


def rounding_of(parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], Codes] | None:
    """What ``round_whole`` was given; None where rows need not be whole."""
    result: Callable[[torch.Tensor], Codes] | None = getattr(parameter, "rounds", None)
    return result


def largest_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """[..., 1] for each row of ``parameter``; None where they are not noted."""
    result: torch.Tensor | None = getattr(parameter, "largest", None)
    return result


def global_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The shape of the parameter that ``parameter`` holds a part of."""
    shape = list(parameter.shape)
    shard = shard_of(parameter)
    if shard is not None:
        shape[shard.dim] = shard.size
    return tuple(shape)


def cut(values: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The part ``shard`` of a whole parameter's values."""
    return torch.cat([values.narrow(shard.dim, begin, end - begin) for begin, end in shard.spans], shard.dim)
