"""Split a step into two micro-batches: one communicates while the other computes.

Rows keep their order: the first micro-batch has the first rows of each segment, the second has the rest.
Decode rows are halved by count, prompts by tokens. If no row boundary balances, the cut goes through a long
prompt:

    plan      [p0 | p1 ............ | p2 | d0 d1 d2 d3]
    first     [p0 | p1 .....  | d0 d1]
    second          [. p1 ... | p2 | d2 d3]         its first row begins ``cut`` tokens into p1

Each micro-batch is a plan of rows only. Slot updates apply once, before both. The second micro-batch comes
after the first. When a prompt is cut, the second micro-batch reads in every layer the caches written by the
first micro-batch in the same layer: when interleaved, the first micro-batch is always one stretch of a layer
ahead (see ``interleave``). Pure: depends on numbers only, with equal results on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from weft.types.plan import PlannedRows, Segment, StepPlan, column

LEAST = 16
"""Minimum tokens of each part of a cut prompt: fewer tokens do not justify an extra row."""


class MicroBatches(NamedTuple):
    """The two micro-batches of a plan."""

    first: StepPlan
    second: StepPlan
    cut: int
    """Number of tokens of the cut prompt row computed in the first micro-batch; 0 if no prompt is cut."""


def split(plan: PlannedRows) -> MicroBatches | None:
    """Return the plan as two non-empty micro-batches; None if the plan has a single row and no cut is
    possible.

    A plan without rows (an idle replica) gives two empty micro-batches.
    """
    if not plan.rows:
        return _micro_batches(plan, 0, 0, 0)
    total = plan.tokens
    counts = plan.decode.count
    uncut: dict[int, list[tuple[int, int]]] = {}  # slot -> positions of images that no cut may divide
    for image in plan.whole_images:
        uncut.setdefault(image.slot, []).append((image.start, image.start + image.count))
    best: tuple[int, int, int, int, int] | None = None
    few = plan.decode.rows // 2
    # With an odd number of decode rows, try both halves. The best split has the smallest difference in
    # tokens; ties prefer no cut.
    for decodes in range(few, few + plan.decode.rows % 2 + 1):
        decoded = int(counts[:decodes].sum())
        for rows, cut, tokens in _places(plan.prefill, total // 2 - decoded, uncut):
            if not (rows or cut or decodes) or (rows == plan.prefill.rows and decodes == plan.decode.rows):
                continue
            found = (abs(2 * (tokens + decoded) - total), int(cut > 0), decodes, rows, cut)
            best = found if best is None else min(best, found)
    return None if best is None else _micro_batches(plan, *best[2:])


def splits(plan: PlannedRows) -> bool:
    """Return True if the plan can be split, as a replica's vote. A plan without rows can be split."""
    return plan.rows != 1 or split(plan) is not None


def larger_micro_batch(plan: PlannedRows) -> int:
    """Return the tokens of the larger micro-batch; 0 if the plan cannot be split."""
    micro_batches = split(plan)
    return 0 if micro_batches is None else max(micro_batches.first.tokens, micro_batches.second.tokens)


def _places(
    prefill: Segment, want: int, uncut: Mapping[int, Sequence[tuple[int, int]]]
) -> Iterator[tuple[int, int, int]]:
    """Yield candidate ends after about ``want`` tokens: (whole rows, tokens of the next row, total
    tokens)."""
    ends = np.cumsum(prefill.count)
    rows = int(np.searchsorted(ends, max(want, 0), side="right"))
    before = int(ends[rows - 1]) if rows else 0
    yield rows, 0, before
    if rows == prefill.rows:
        return
    yield rows + 1, 0, int(ends[rows])
    count = int(prefill.count[rows])
    # Both parts of a cut prompt must have at least LEAST tokens.
    if count >= 2 * LEAST:
        cut = min(max(want - before, LEAST), count - LEAST)
        start = int(prefill.start[rows])
        for low, high in uncut.get(int(prefill.slot[rows]), ()):
            # Move a cut within an image to the image's beginning, else to the end.
            if low < start + cut < high:
                cut = low - start if low - start >= LEAST else high - start
        if LEAST <= cut <= count - LEAST:
            yield rows, cut, before + cut


def _micro_batches(plan: PlannedRows, decodes: int, rows: int, cut: int) -> MicroBatches:
    """Return the plan in two: ``decodes`` decode rows, ``rows`` prefill rows and ``cut`` tokens of the next
    row go into the first part.
    """
    prefill = plan.prefill
    decode = plan.decode
    first = _rows(prefill, 0, rows + int(cut > 0))
    second = _rows(prefill, rows, prefill.rows)
    # The cut row appears in both: only the second part samples, and trailing logits are divided.
    if cut:
        # Trailing logits belong to the last positions: the second part gets as many as fit.
        rest = int(prefill.count[rows]) - cut
        trailing = int(prefill.logits[rows])
        first = _with(first, -1, count=cut, logits=max(trailing - rest, 0), sample=0, next_k=0)
        second = _with(
            second, 0, start=int(prefill.start[rows]) + cut, count=rest, logits=min(trailing, rest)
        )
    return MicroBatches(
        StepPlan(step=plan.step, prefill=first, decode=_rows(decode, 0, decodes)),
        StepPlan(step=plan.step, prefill=second, decode=_rows(decode, decodes, decode.rows)),
        cut,
    )


def _rows(segment: Segment, begin: int, end: int) -> Segment:
    """Return rows begin .. end - 1 as views."""
    return Segment(**{name: getattr(segment, name)[begin:end] for name in segment.__struct_fields__})


def _with(segment: Segment, row: int, **values: int) -> Segment:
    """Return the segment with other values in one row. Changed columns are copied."""
    changed = {}
    for name, value in values.items():
        copy = getattr(segment, name).copy()
        copy[row] = value
        changed[name] = column(copy)
    return msgspec.structs.replace(segment, **changed)
