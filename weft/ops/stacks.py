"""Stacks of quantized matrices: separate until each matrix is taken, or in common tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.ops.coded import Codes, all_factors, all_zeros, as_bytes, common_group, joined


class Unstacked:
    """A stack whose matrices are still separate, each in pieces of rows, all of one number format.

    ``take`` releases the pieces of a matrix. A consumer that converts one matrix after another therefore
    never has the whole stack and the whole result in memory.
    """

    def __init__(self, matrices: list[list[Codes]], group: int) -> None:
        """Create the stack; use ``unstacked``. ``group``: the common group size of all pieces."""
        parts = [part for rows in matrices for part in rows]
        self._matrices = matrices
        self._group = group
        self._zeros = any(part.zeros is not None for part in parts)
        self._factors = any(part.factors is not None for part in parts)
        self.shape = (len(matrices), sum(map(len, matrices[0])), parts[0].inputs)

    def __len__(self) -> int:
        return len(self._matrices)

    def take(self, place: int) -> Codes:
        """Return matrix ``place`` in the common format of the stack.

        Call once per matrix: its pieces are released.
        """
        rows = self._matrices[place]
        self._matrices[place] = []
        parts = [self._like_all(part) for part in rows]
        made = joined(parts)
        assert made is not None, "all are of one kind"
        return made

    def whole(self) -> Codes:
        """Return the whole stack as ``Codes``, [E, ...], a copy.

        Takes every matrix: none can be taken before or afterwards.
        """
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
        # One matrix at a time: its pieces are released before the next matrix is taken.
        for place in range(count):
            one = self.take(place) if place else first
            for to, tensor in zip(made.tensors(), one.tensors(), strict=True):
                as_bytes(to)[place] = as_bytes(tensor)
            one.drop_pages()
        return made

    def _like_all(self, part: Codes) -> Codes:
        part = part.regrouped(self._group)
        # Zero points or factors in any piece require the same tensors in all pieces: tensors are stacked.
        zeros = all_zeros([part]) if self._zeros else None
        return replace(part, zeros=zeros, factors=all_factors([part]) if self._factors else None)


def unstacked(matrices: list[list[Codes]]) -> Unstacked | None:
    """Return a stack of matrices of one shape, each in pieces of rows; None if the formats differ.

    ``matrices`` must not be empty. The stack takes ownership of ``matrices`` and empties its lists.
    """
    parts = [part for rows in matrices for part in rows]
    group = common_group(parts)
    if group is None or any(part.order is not None for part in parts):
        return None
    return Unstacked(matrices, group)


def stacked(parts: Sequence[Codes]) -> Codes | None:
    """Return matrices of one shape as a stack in common tensors; None if the formats differ."""
    found = unstacked([[part] for part in parts])
    return None if found is None else found.whole()
