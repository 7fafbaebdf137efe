"""Transport of rows to the experts of other ranks, and of the experts' outputs back home: four forms.

Every row has a home rank, which routes the row and adds up the outputs of its experts. An expert's rank
answers with

    answer    [rows, A, hidden]     A = top_k: each expert's output by itself, zeros for experts elsewhere, in
                                    the model's dtype or wider;
                                    A = 1: their weighted sum in top-k order, rounded

The home rank adds the ranks' answers in order of ranks, and with A = top_k then the experts in top-k order.
So all forms give the same bits. With A = top_k the bits equal the bits of one rank, if the rows of an expert
do not affect each other.

    form         out                       back                   sizes
    reduce       nothing: all ranks have   all-reduce             known: all ranks have the same rows
                 all rows
    gather       all-gather                reduce-scatter         padded to the most rows of a rank
    low-latency  all-to-all, every row     all-to-all             padded to the most rows of a rank: no host
                 to every rank                                    read, none is ever dropped
    throughput   all-to-all, each row to   all-to-all of what     exact: counts go first
                 the ranks that it needs   is not zero

The generators yield like ``Block.steps``; the number of yields does not depend on the rows. Work without
dependencies (``under``) runs while rows are in transit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from weft.common.errors import EngineDead
from weft.parallel.comm import Comm, Pending

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Routed rows of a home rank (for ``reduce``: all rows). n rows, k experts each."""

    x: Tensor
    """Hidden states, [n, hidden]."""
    ranks: Tensor
    """Rank of the expert of each pair of row and expert, int64 [n, k]."""
    places: Tensor
    """Place of the expert on the rank, int64 [n, k]."""
    scales: Tensor
    """Weight of each pair, wide [n, k]."""


class Work(NamedTuple):
    """Work of a rank for the rows of other ranks."""

    answer: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Function from x [R, hidden], places int64 [R, k] (-1: another rank's) and scales (wide [R, k], or None
    if exact) to answers [R, A, hidden], with zeros for missing experts."""
    exact: bool
    """True if A is top_k."""
    under: Callable[[], Any]
    """Function called once, while rows are in transit."""


class Came(NamedTuple):
    """Results at the home rank."""

    total: Tensor
    """Sum of all ranks' answers, [n, A, hidden]."""
    under: Any
    """Result of ``Work.under``."""


Steps: TypeAlias = Generator[Pending, None, Came]
Form: TypeAlias = Callable[[Comm, Rows, Work, "int | None"], Steps]
"""(ep, rows, work, maximum rows per rank or None if unknown) -> results at the home rank."""


# --- rows, places and scales as one tensor ---


def _as_columns(x: Tensor, more: Tensor) -> Tensor:
    """Return the bits of ``more`` [n, m] (elements of 8 or 4 bytes) as columns of x's dtype."""
    return more.contiguous().view(x.dtype)


def _of_columns(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor of ``_as_columns`` in ``dtype``, as a copy.

    ``contiguous`` keeps the stride of a single row, and such a stride may not permit a view.
    """
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def _joined(x: Tensor, places: Tensor, scales: Tensor | None) -> Tensor:
    parts = [x, _as_columns(x, places)]
    if scales is not None:
        parts.append(_as_columns(x, scales))
    return torch.cat(parts, dim=-1)


class _Shape(NamedTuple):
    """Layout of rows made by ``_joined``."""

    hidden: int
    top_k: int
    wide: torch.dtype | None
    """Dtype of the scales; None if scales stay at home."""

    def columns(self, dtype: torch.dtype) -> int:
        size = 8 + (0 if self.wide is None else self.wide.itemsize)
        return self.hidden + self.top_k * size // dtype.itemsize

    def apart(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Split rows into x [R, hidden], places int64 [R, k] and scales (wide [R, k] or None)."""
        middle = self.hidden + self.top_k * 8 // rows.dtype.itemsize
        places = _of_columns(rows[:, self.hidden : middle], torch.int64)
        scales = None if self.wide is None else _of_columns(rows[:, middle:], self.wide)
        return rows[:, : self.hidden], places, scales


def _shape(rows: Rows, work: Work) -> _Shape:
    wide = None if work.exact else rows.scales.dtype
    return _Shape(rows.x.shape[1], rows.ranks.shape[1], wide)


def _sent(rows: Rows, work: Work) -> Tensor | None:
    """Return the scales to send; None if exact."""
    return None if work.exact else rows.scales


def _padded(x: Tensor, rows: int, value: int = 0) -> Tensor:
    """Return x padded to ``rows`` rows with ``value``. Raises EngineDead if x has more rows."""
    if len(x) > rows:
        raise EngineDead(f"a rank has {len(x)} rows in a step whose ranks agreed on {rows} at most")
    if len(x) == rows:
        return x
    return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), value)])


# --- the forms ---


def reduce(ep: Comm, rows: Rows, work: Work, most: int | None) -> Steps:
    """Sum the answers of all ranks.

    All ranks have the same rows, and each gets the whole sum. Like all forms: yields once per collective,
    returns the answers of the own rows and the result of ``work.under``, which runs during a collective.
    ``most``: maximum rows per home rank.
    """
    places = torch.where(rows.ranks == ep.rank, rows.places, -1)
    answer = work.answer(rows.x, places, _sent(rows, work))
    pending = ep.all_reduce(answer)
    under = work.under()
    if pending is None:
        return Came(answer, under)
    yield pending
    return Came(pending.result(), under)


def gather(ep: Comm, rows: Rows, work: Work, most: int | None) -> Steps:
    """Send all rows to every rank; each home rank receives the sum of its rows.

    Without ``most``, the ranks first exchange their numbers of rows. Raises EngineDead for more than ``most``
    rows.
    """
    if most is None:
        count = torch.tensor([len(rows.x)], device=rows.x.device)
        pending = ep.all_gather(count)
        yield pending
        most = int(pending.result().max())
    shape, (n, k), scales = _shape(rows, work), rows.ranks.shape, _sent(rows, work)
    # Rank -1 in padding matches no rank, so padding gets zeros.
    pairs = torch.cat((_padded(rows.ranks, most, -1), _padded(rows.places, most, -1)), dim=1)
    sent = _joined(_padded(rows.x, most), pairs, None if scales is None else _padded(scales, most))
    pending = ep.all_gather(sent)
    under = work.under()
    yield pending
    x, pairs, scales = shape._replace(top_k=2 * k).apart(pending.result().view(-1, sent.shape[1]))
    ranks = pairs[:, :k]
    places = pairs[:, k:]
    answer = work.answer(x, torch.where(ranks == ep.rank, places, -1), scales)
    pending = ep.reduce_scatter(answer.view(ep.size, most, *answer.shape[1:]))
    yield pending
    return Came(pending.result()[:n], under)


def low_latency(ep: Comm, rows: Rows, work: Work, most: int | None) -> Steps:
    """Send every row to every rank, into space for ``most`` rows, so the host reads nothing.

    Raises EngineDead for more than ``most`` rows.
    """
    assert most is not None
    shape = _shape(rows, work)
    size = ep.size
    n = len(rows.x)
    numbers = torch.arange(size, device=rows.x.device).view(size, 1, 1)
    x = _padded(rows.x, most)
    scales = _sent(rows, work)
    ranks = _padded(rows.ranks, most, -1)
    places = _padded(rows.places, most, -1)
    places = torch.where(ranks == numbers, places, -1)  # [size, most, k]: places on each destination rank
    if scales is not None:
        scales = _padded(scales, most).expand(size, most, -1)
    sent = _joined(x.expand(size, most, -1), places, scales).flatten(0, 1)
    each = [most] * size
    pending = ep.all_to_all(sent, each, each, even=True)
    under = work.under()
    yield pending
    answer = work.answer(*shape.apart(pending.result()))
    pending = ep.all_to_all(answer, each, each, even=True)
    yield pending
    parts = pending.result().view(size, most, *answer.shape[1:])
    return Came(_in_order(parts)[:n], under)


def throughput(ep: Comm, rows: Rows, work: Work, most: int | None) -> Steps:
    """Send each row once to each rank with one of its experts.

    Only nonzero answers return. The host waits for the sizes of the exchange.
    """
    shape, size, (n, k) = _shape(rows, work), ep.size, rows.ranks.shape
    numbers = torch.arange(size, device=rows.x.device).view(size, 1, 1)
    mine = rows.ranks == numbers  # [size, n, k]
    to, row = mine.any(2).nonzero(as_tuple=True)
    places = torch.where(mine[to, row], rows.places[row], -1)
    pairs = mine.sum(2) if work.exact else mine.any(2)
    counts = torch.stack((mine.any(2).sum(1), pairs.sum(1)), dim=1)  # [size, 2]: rows out, answers back
    pending = ep.all_to_all(counts, [1] * size, [1] * size, even=True)
    yield pending
    # The host reads the exact sizes of both exchanges.
    (out, back), (into, answers) = (c.T.tolist() for c in (counts, pending.result()))
    sent = _joined(rows.x[row], places, None if work.exact else rows.scales[row])
    pending = ep.all_to_all(sent, out, into)
    under = work.under()
    yield pending
    x, theirs, scales = shape.apart(pending.result().view(-1, shape.columns(rows.x.dtype)))
    answer = work.answer(x, theirs, scales)
    answer = answer[theirs >= 0] if work.exact else answer[:, 0]
    pending = ep.all_to_all(answer, answers, back)
    yield pending
    came = pending.result().view(-1, shape.hidden)
    # Answers return in the order of the sent pairs, so ``row`` and ``choice`` locate each answer.
    if work.exact:
        total = came.new_zeros(n, k, shape.hidden)
        pair, choice = (places >= 0).nonzero(as_tuple=True)
        total[row[pair], choice] = came
        return Came(total, under)
    total = rows.x.new_zeros(n, 1, shape.hidden).to(rows.scales.dtype)
    for part, at in zip(came.split(back), row.split(out), strict=True):
        total[at, 0] += part
    return Came(total.to(rows.x.dtype), under)


def _in_order(parts: Tensor) -> Tensor:
    """Return the sum ``parts[0] + parts[1] + ..`` in order, in float32 or wider, rounded once."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for rank in range(1, len(parts)):  # iterating over the tensor would make a list, which cannot be captured
        total += parts[rank]
    return total.to(parts.dtype)


FORMS: dict[str, Form] = {
    "reduce": reduce,
    "gather": gather,
    "low-latency": low_latency,
    "throughput": throughput,
}
