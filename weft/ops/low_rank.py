"""Low-rank products for rows of different adapters: ``y += B (A x)`` with the A and B of each row's place.

A pool has the matrices of several adapters for one matrix of the model, each adapter in one place. A row
names its place, or -1 for no adapter.

    a  [places, parts, rank, inputs]     part: one of the published matrices in one matrix (q, k, v)
    b  [places, rank, outputs]           the outputs of a part read the part's A only

Source: Hu et al. 2021, arXiv 2106.09685; rows of different adapters in one batch, Chen et al. 2023, arXiv
2310.18547.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from weft.ops.registry import Implementation, register

Tensor = torch.Tensor


class AdapterRows:
    """Places of the rows of a step. Belongs to one step."""

    __slots__ = ("_groups", "_repeated", "_segments", "_selected", "numbers", "present")

    def __init__(self, numbers: Tensor, present: Sequence[int]) -> None:
        """``numbers``: int32 [T], on the device. ``present``: the different places among them, ascending; ()
        in a captured step, where only ``numbers`` may be read."""
        self.numbers = numbers
        self.present = tuple(present)
        self._groups: list[tuple[int, Tensor | None]] | None = None
        self._selected: tuple[Tensor, AdapterRows] | None = None
        self._repeated: tuple[int, AdapterRows] | None = None
        self._segments: dict[tuple[int, int], AdapterRows | None] = {}

    def groups(self) -> list[tuple[int, Tensor | None]]:
        """Return (place, int64 [n]: rows) for each place with rows; None for all rows.

        Computed once. The host waits for the device.
        """
        if self._groups is None:
            found = [(place, (self.numbers == place).nonzero().view(-1)) for place in self.present]
            self._groups = [
                (place, None if len(rows) == len(self.numbers) else rows)
                for place, rows in found
                if len(rows)
            ]
        return self._groups

    def at(self, index: Tensor | None) -> AdapterRows:
        """Return the places of the rows ``index`` (int64 [L]; None: all rows)."""
        if index is None:
            return self
        if self._selected is None or self._selected[0] is not index:
            self._selected = index, AdapterRows(self.numbers[index], self.present)
        return self._selected[1]

    def part(self, begin: int, end: int) -> AdapterRows:
        """Return the places of the rows begin .. end - 1."""
        return AdapterRows(self.numbers[begin:end], self.present)

    def segment(self, begin: int, end: int) -> AdapterRows | None:
        """Return ``part``, computed once. On a CPU ``present`` has the places of these rows only, and the
        result is None if none of these rows has an adapter."""
        if (begin, end) in self._segments:
            return self._segments[begin, end]
        numbers, present = self.numbers[begin:end], self.present
        found: AdapterRows | None = AdapterRows(numbers, present)
        # A captured step has no list of places, and an empty list means a captured step.
        if present and numbers.device.type == "cpu":
            present = tuple(place for place in numbers.unique().tolist() if place >= 0)
            found = AdapterRows(numbers, present) if present else None
        self._segments[begin, end] = found
        return found

    def repeated(self, count: int) -> AdapterRows:
        """Return the places in a stack of ``count`` matrices per adapter, for ``count`` times the rows.

        Row ``matrix * T + row`` has the place ``place * count + matrix``. Computed once.
        """
        if self._repeated is None or self._repeated[0] != count:
            matrices = torch.arange(count, dtype=torch.int32, device=self.numbers.device).unsqueeze(1)
            # [count, T]
            numbers = torch.where(self.numbers < 0, -1, self.numbers * count + matrices).to(torch.int32)
            present = [place * count + matrix for place in self.present for matrix in range(count)]
            self._repeated = count, AdapterRows(numbers.view(-1), present)
        return self._repeated[1]


@dataclass(slots=True, kw_only=True)
class LowRankPool:
    """Matrices of all places for one matrix of the model. Unused ranks and parts are zero."""

    a: Tensor
    b: Tensor
    spans: tuple[tuple[int, int, int], ...]
    """(part, begin, end): outputs begin .. end - 1 read the A of ``part``. Other outputs get nothing."""
    ranks: list[int] = field(default_factory=list)
    """Largest rank of a part, by place; 0 if the adapter in the place has no matrices here."""
    device_ranks: Tensor
    """int32 [places]: ``ranks`` on the device."""
    owners: Tensor
    """int32 [outputs], on the device: the part of each output, or -1."""
    factors: dict[int, Tensor] = field(default_factory=dict)
    """DoRA, by place: wide [outputs], factor of the sum of base and product. Without the bias."""

    @property
    def flat_spans(self) -> list[int]:
        """``spans`` as one list."""
        return [number for span in self.spans for number in span]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def clear(self, place: int) -> None:
        """Remove the matrices of ``place``."""
        self.a[place].zero_()
        self.b[place].zero_()
        self.factors.pop(place, None)
        self.set_rank(place, 0)

    def set_rank(self, place: int, rank: int) -> None:
        """Set the rank of ``place`` after its matrices were written."""
        self.ranks[place] = rank
        self.device_ranks[place].fill_(rank)


def make_pool(
    places: int,
    rank: int,
    parts: int,
    shape: tuple[int, int],
    spans: Sequence[tuple[int, int, int]],
    dtype: torch.dtype,
    device: torch.device,
) -> LowRankPool:
    """Return an empty pool for a matrix of ``shape`` (outputs, inputs) on this rank."""
    outputs, inputs = shape
    owners = torch.full((outputs,), -1, dtype=torch.int32)
    for part, begin, end in spans:
        owners[begin:end] = part
    return LowRankPool(
        a=torch.zeros(places, parts, rank, inputs, dtype=dtype, device=device),
        b=torch.zeros(places, rank, outputs, dtype=dtype, device=device),
        spans=tuple(spans),
        ranks=[0] * places,
        device_ranks=torch.zeros(places, dtype=torch.int32, device=device),
        owners=owners.to(device),
    )


def scale_rows(y: Tensor, pool: LowRankPool, rows: AdapterRows, bias: Tensor | None) -> None:
    """Multiply the rows of y [T, outputs] with the factors of their places, in place, except for the bias.

    A factor per output is linear, so y may be a partial result. Not for captured steps: the host reads rows.
    Source: DoRA, Liu et al. 2024, arXiv 2402.09353.
    """
    for place, index in rows.groups():
        factors = pool.factors.get(place)
        if factors is None:
            continue
        made = (y if index is None else y.index_select(0, index)).to(factors.dtype)
        made = made * factors if bias is None else (made - bias) * factors + bias
        if index is None:
            y.copy_(made)
        else:
            y.index_copy_(0, index, made.to(y.dtype))


def low_rank(y: Tensor, x: Tensor, pool: LowRankPool, rows: AdapterRows) -> None:
    """Add the low-rank product of each row to y [T, outputs], in place. x: [T, inputs], in y's dtype."""
    for place, index in rows.groups():
        rank = pool.ranks[place]
        if not rank:
            continue
        mine = x if index is None else x.index_select(0, index)
        # [n, parts * rank]
        inner = F.linear(mine, pool.a[place, :, :rank].flatten(0, 1))
        for part, begin, end in pool.spans:
            added = inner[:, part * rank : (part + 1) * rank] @ pool.b[place, :rank, begin:end]
            if index is None:
                y[:, begin:end] += added
            else:
                y[:, begin:end].index_add_(0, index, added)


# Not ``asks``: steps without adapters never call the op, and may be captured. ``AdapterRows.groups`` asks.
register("low_rank", Implementation(name="torch", run=low_rank))
