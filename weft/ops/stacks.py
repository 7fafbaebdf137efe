"""Stacks of matrices of few bits: apart, until each is taken, or in tensors for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.ops.coded import Codes, all_factors, all_zeros, as_bytes, common_group, joined


class Unstacked:
    """A stack whose matrices are still apart, each in pieces of its rows, all of one kind.

    A matrix is taken once, and its pieces go with it: what is made of a stack one matrix after another never
    lies beside the whole of it.
    """

    def __init__(self, matrices: list[list[Codes]], group: int) -> None:
        """``unstacked`` makes one. group: inputs that have a scale in common in all of them."""
        parts = [part for rows in matrices for part in rows]
        self._matrices = matrices
        self._group = group
        self._zeros = any(part.zeros is not None for part in parts)
        self._factors = any(part.factors is not None for part in parts)
        self.shape = (len(matrices), sum(map(len, matrices[0])), parts[0].inputs)

    def __len__(self) -> int:
        return len(self._matrices)

    def take(self, place: int) -> Codes:
        """Matrix ``place``, described as all others are. Once."""
        rows = self._matrices[place]
        self._matrices[place] = []
        parts = [self._like_all(part) for part in rows]
        made = joined(parts)
        assert made is not None, "all are of one kind"
        return made

    def whole(self) -> Codes:
        """All of them in tensors for all: nothing is left to be taken."""
        first = self.take(0)
        count = len(self)
        made = replace(
            first,
            mapped=None,
            values=first.values.new_empty(count, *first.values.shape),
            scales=first.scales.new_empty(count, *first.scales.shape),
            zeros=None if first.zeros is None else first.zeros.new_empty(count, *first.zeros.shape),
            factors=None if first.factors is None else first.factors.new_empty(count, *first.factors.shape),
        )
        for place in range(count):
            one = self.take(place) if place else first
            for to, tensor in zip(made.tensors(), one.tensors(), strict=True):
                as_bytes(to)[place] = as_bytes(tensor)
            one.drop_pages()
        return made

    def _like_all(self, part: Codes) -> Codes:
        part = part.regrouped(self._group)
        zeros = all_zeros([part]) if self._zeros else None
        return replace(part, zeros=zeros, factors=all_factors([part]) if self._factors else None)


def unstacked(matrices: list[list[Codes]]) -> Unstacked | None:
    """Matrices of one shape, at least one, each in pieces of its rows; None where they are of different
    kinds.

    Whoever has ``matrices`` gives them up.
    """
    parts = [part for rows in matrices for part in rows]
    group = common_group(parts)
    if group is None or any(part.order is not None for part in parts):
        return None
    return Unstacked(matrices, group)


def stacked(parts: Sequence[Codes]) -> Codes | None:
    """Matrices of one shape as a stack; None where they are of different kinds."""
    found = unstacked([[part] for part in parts])
    return None if found is None else found.whole()
