"""Parts that the backends of all recurrent layers share: groups of rows, and functions of tokens.

All functions of a token are compositions of exp and log. In torch's own functions the last elements of a loop
differ from the other elements in the last bits, which would break bitwise invariance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from weft.attention.base import SegmentInput
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.upload import upload

Tensor = torch.Tensor
R = TypeVar("R")

FEW = 16
"""Maximum tokens of a row for the computation token by token."""
SPAN = 2048
"""Tokens of a row per pass. Bounds the memory. A multiple of every chunk size."""
MOST_BY_KERNELS = 64
"""Maximum tokens of a row for kernels that compute token by token: see ``KernelRows``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """B rows of at most n tokens each, in one computation."""

    rows: Tensor | None
    """int64 [B]; None: all rows of the segment."""
    tokens: Tensor | None
    """int64 [B, n]: places in the segment; padding names the first token of the row. None: all tokens, in
    order."""
    counts: Tensor | None
    """int64 [B]; None: n for every row."""
    size: int
    most: int
    """n."""


class ByRowGroups:
    """Part of torch backends of recurrent layers: accepts every model, and prepares the groups of rows."""

    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Accept every model."""

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> tuple[RowGroup, ...]:
        """Return the groups of the rows of ``segment``."""
        return tuple(row_groups(segment))


class KernelRows(ByRowGroups):
    """Part of Triton backends of recurrent layers: short rows by kernels, segments with longer rows by torch.

    The kernels compute token by token. An invariant backend computes every row by the kernels.
    """

    invariant: bool

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> tuple[RowGroup, ...]:
        """Return the groups of rows for torch; none for the kernels."""
        if self.by_kernels(segment):
            return ()
        return super().prepare(segment, kind, spec, block_size, dtype)

    def by_kernels(self, segment: SegmentInput) -> bool:
        """Return True if the kernels compute the segment. Depends on the host's counts only."""
        return self.invariant or bool((segment.host_counts <= MOST_BY_KERNELS).all())


def columns_of(segment: SegmentInput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the columns of a segment that kernels of recurrent layers read."""
    return segment.q_offsets, segment.starts, segment.slots, segment.live


def row_groups(segment: SegmentInput) -> Iterator[RowGroup]:
    """Yield rows grouped by equal counts (short rows), or by counts within a factor of two (longer rows)."""
    counts = segment.host_counts.astype(np.int64)
    device = segment.starts.device
    if not segment.rows:
        return
    if (counts == counts[0]).all():
        yield RowGroup(rows=None, tokens=None, counts=None, size=segment.rows, most=int(counts[0]))
        return
    firsts = np.cumsum(counts) - counts
    alike: dict[int, list[int]] = {}
    for row, count in enumerate(counts.tolist()):
        if count:
            alike.setdefault(count if count <= FEW else FEW * count.bit_length(), []).append(row)
    for rows in _padded(alike.values(), counts):
        each = counts[rows]
        most = int(counts[rows].max())
        within = np.arange(most)
        places = firsts[rows, None] + np.where(within < each[:, None], within, 0)
        yield RowGroup(
            rows=upload(rows, device),
            tokens=upload(places, device),
            counts=None if (each == most).all() else upload(each, device),
            size=len(rows),
            most=most,
        )


def _padded(groups: Iterable[list[int]], counts: np.ndarray) -> Iterator[np.ndarray]:
    """Yield ``groups`` as int64 [B], cut so that no group has more tokens with padding than the segment has.

    Bounds the memory: see ``weft.config.sizing.layer_elements.delta_elements``.
    """
    total = int(counts.sum())
    for members in groups:
        together = max(1, total // int(counts[members].max()))
        for first in range(0, len(members), together):
            yield np.array(members[first : first + together], np.int64)


def take(x: Tensor, group: RowGroup, begin: int, n: int) -> Tensor:
    """Return tokens begin .. begin + n - 1 of the rows of a group: [B, n, columns] from x [T, columns]."""
    if group.tokens is None:
        return x.unflatten(0, (group.size, group.most))[:, begin : begin + n]
    return x[group.tokens[:, begin : begin + n]]


def put(out: Tensor, made: Tensor, group: RowGroup, begin: int, n: int) -> None:
    """Write ``made`` [B, n, columns] to the rows of ``out``. Padding writes too, so its value must be
    harmless."""
    if group.tokens is None:
        out.unflatten(0, (group.size, group.most))[:, begin : begin + n] = made
        return
    places = group.tokens[:, begin : begin + n]
    if group.counts is not None:
        # Padding indices point at the first token of the row, so they must write the same value as the first
        # token.
        filler = torch.arange(begin, begin + n, device=out.device) >= group.counts.unsqueeze(1)
        first = out[group.tokens[:, 0]] if begin else made[:, 0].to(out.dtype)
        made = torch.where(filler.unsqueeze(2), first.unsqueeze(1), made.to(out.dtype))
    out[places] = made.to(out.dtype)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + (1 + (-x.abs()).exp()).log()


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def convolve(inputs: Tensor, past: Tensor, taps: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (causal convolution [B, n, channels], last inputs for the next token).

    inputs: [B, n, channels]; past: [B, taps - 1, channels], the inputs before; taps: [taps, channels], the
    tap of the oldest input first; real: int64 [B], None for all n.
    """
    n = inputs.shape[1]
    back = past.shape[1]
    window = torch.cat((past, inputs), dim=1)
    made = window[:, :n] * taps[0]
    for j in range(1, back + 1):
        made = made + window[:, j : j + n] * taps[j]
    if real is None:
        last = window[:, n:]
    else:
        # The last ``back`` real inputs of each row; padding behind the real inputs is skipped.
        places = real.unsqueeze(1) + torch.arange(back, device=real.device)
        last = window.gather(1, places.unsqueeze(2).expand(-1, -1, window.shape[2]))
    return made, last


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sum over ``dim``, which keeps size 1, in an order that depends on the size only."""
    # Add the upper half to the lower half until one element is left: the tree depends on the size only.
    while (n := x.shape[dim]) > 1:
        half = (n + 1) // 2
        low, high = x.split((half, n - half), dim=dim)
        x = torch.cat((low.narrow(dim, 0, n - half) + high, low.narrow(dim, n - half, 2 * half - n)), dim)
    return x


def read_inputs(
    parts: tuple[Tensor, ...], slots: Tensor, live: Tensor, fresh: Tensor, repeats: tuple[int, ...] = ()
) -> Tensor:
    """Return the last convolution inputs of rows, [B, taps - 1, channels]; zeros where a row is fresh.

    parts: [slots, copies, heads, taps - 1, dim] each; slots, live: int64 [B]; fresh: bool [B]; repeats:
    number of equal neighbouring heads in each part, of which the first is read.
    """
    each = repeats or (1,) * len(parts)
    read = (part[slots, live][:, ::n] for part, n in zip(parts, each, strict=True))
    past = torch.cat([heads.transpose(1, 2).flatten(2) for heads in read], dim=2)
    return past.masked_fill(fresh.view(-1, 1, 1), 0.0)


def write_inputs(
    parts: tuple[Tensor, ...], slots: Tensor, copy: int, past: Tensor, repeats: tuple[int, ...] = ()
) -> None:
    """Write ``past``, as ``read_inputs`` returns it, to place ``copy`` of the rows' slots, in place."""
    each = repeats or (1,) * len(parts)
    sizes = [part.shape[2] // n * part.shape[4] for part, n in zip(parts, each, strict=True)]
    # [B, taps - 1, heads * dim] -> [B, heads, taps - 1, dim]
    for part, n, inputs in zip(parts, each, past.split(sizes, dim=2), strict=True):
        heads = inputs.unflatten(2, (part.shape[2] // n, part.shape[4])).transpose(1, 2)
        heads = heads if n == 1 else heads.repeat_interleave(n, dim=1)
        part[:, copy].index_copy_(0, slots, heads.to(part.dtype))


class Parted(Protocol):
    """Inputs of a recurrence for n tokens of B rows."""

    @property
    def size(self) -> tuple[int, int]:
        """(B, n)."""

    def part(self: P, rows: slice, span: slice) -> P:
        """Return tokens ``span`` of ``rows``."""


P = TypeVar("P", bound=Parted)


def in_parts(
    compute: Callable[[P, Tensor], tuple[Tensor, Tensor]], tokens: P, state: Tensor, together: int, most: int
) -> tuple[Tensor, Tensor]:
    """Return (outputs [B, heads, n, dim], state after the last token) by several calls of ``compute``.

    Bounds the memory: a call gets at most ``together`` rows (at least one), and at most ``most`` tokens of
    each row. ``state``: [B, ..].
    """
    count, n = tokens.size
    together = max(1, together)
    if together >= count and n <= most:
        return compute(tokens, state)
    outs, states = [], []
    for first in range(0, count, together):
        rows = slice(first, first + together)
        made, after = [], state[rows]
        for begin in range(0, n, most):
            out, after = compute(tokens.part(rows, slice(begin, begin + most)), after)
            made.append(out)
        outs.append(torch.cat(made, dim=2) if len(made) > 1 else made[0])
        states.append(after)
    return torch.cat(outs), torch.cat(states)


class Recurrence(ABC, Generic[R]):
    """One layer's recurrence with torch operations. ``R``: the state of a group's rows between passes."""

    @abstractmethod
    def read(self, slots: Tensor, live: Tensor, fresh: Tensor) -> R:
        """Return copies of the states in copy ``live`` [B] of ``slots`` [B], zeros where ``fresh`` [B]."""

    @abstractmethod
    def write(self, slots: Tensor, copy: int, rows: R) -> None:
        """Write the states to copy ``copy`` of ``slots`` [B], in place."""

    @abstractmethod
    def tokens(self, inputs: tuple[Tensor, ...], rows: R, real: Tensor | None) -> Tensor:
        """Return outputs [B, n, columns] for inputs [B, n, .] each, and advance ``rows``.

        real: int64 [B], number of real tokens per row, in front of the padding; None: all n. Padding must
        leave the state unchanged.
        """

    def advance(
        self,
        inputs: tuple[Tensor, ...],
        out: Tensor,
        segment: SegmentInput,
        prepared: object,
        *,
        each: bool,
    ) -> None:
        """Advance every row of the segment by its tokens, and write ``out`` [T, columns].

        inputs: [T, .] each; prepared: the row groups of the segment, computed here if None. A row reads copy
        ``live`` of its slot, or zeros at position 0. With ``each`` the state after token j goes to copy j,
        otherwise the state after the last token goes to copy 0. Does nothing without tokens.
        """
        if not segment.tokens:
            return
        groups = prepared if isinstance(prepared, tuple) else tuple(row_groups(segment))
        for group in groups:
            slots, live, starts = (
                column if group.rows is None else column[group.rows]
                for column in (segment.slots, segment.live, segment.starts)
            )
            rows = self.read(slots, live, starts == 0)
            # With ``each`` a pass has one token, because the state after every token is stored.
            span = 1 if each else SPAN
            for begin in range(0, group.most, span):
                n = min(span, group.most - begin)
                taken = tuple(take(x, group, begin, n) for x in inputs)
                real = None if group.counts is None else (group.counts - begin).clamp(0, n)
                put(out, self.tokens(taken, rows, real), group, begin, n)
                if each:
                    self.write(slots, begin, rows)
            if not each:
                self.write(slots, 0, rows)


@dataclass(slots=True)
class Inputs:
    """Convolution inputs of a group's rows between passes."""

    past: Tensor
    """[B, taps - 1, channels], in the model's dtype."""


class Convolution(Recurrence[Inputs]):
    """A recurrence whose state is the last inputs of a convolution. ``state``: as in ``read_inputs``."""

    def __init__(self, state: tuple[Tensor, ...]) -> None:
        self._state = state

    def read(self, slots: Tensor, live: Tensor, fresh: Tensor) -> Inputs:
        return Inputs(read_inputs(self._state, slots, live, fresh))

    def write(self, slots: Tensor, copy: int, rows: Inputs) -> None:
        write_inputs(self._state, slots, copy, rows.past)
