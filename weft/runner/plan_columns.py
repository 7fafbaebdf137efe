"""A plan's columns as a step needs them: whose each token is, which rows have logits. On the host."""

from __future__ import annotations

import numpy as np

from weft.types.plan import Segment, StepPlan


def most_each(plan: StepPlan) -> int:
    """Most tokens of a row, in a plan of decode rows alone, all of which draw behind each; 0 of any other."""
    rows = plan.decode
    if plan.prefill.rows or not rows.rows:
        return 0
    most = int(rows.count.max())
    if rows.sample is rows.count and rows.logits is rows.count:  # as the scheduler makes them
        return most
    alike = (rows.logits == rows.count).all() and (rows.sample == rows.count).all()
    return most if alike else 0


def even(plan: StepPlan, each: int) -> bool:
    """Whether all of the plan's rows are decode rows of ``each`` tokens, the most that one has."""
    return each == 1 or (each > 1 and int(plan.decode.count.min()) == each)


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``starts[0] .. starts[0] + lengths[0] - 1, starts[1] ..``: consecutive ranges, one array."""
    lengths = lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shift = starts.astype(np.int64) - (ends - lengths)
    result: np.ndarray = np.repeat(shift, lengths) + np.arange(total)
    return result


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: 0 and the running sums of ``lengths``."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def row_columns(prefill: Segment, decode: Segment) -> list[np.ndarray]:
    """Slot and count of each row; each token's row and place in it; the offsets of each segment's rows."""
    count = np.concatenate([prefill.count, decode.count])
    return [
        np.concatenate([prefill.slot, decode.slot]),
        count,
        np.repeat(np.arange(len(count)), count),
        ragged(np.zeros(len(count)), count),
        offsets_of(prefill.count),
        offsets_of(decode.count),
    ]


def logits_columns(plan: StepPlan) -> tuple[np.ndarray, list[np.ndarray]]:
    """(merged rows with logits; for sampled and for prompt entries: slot, row of the logits)."""
    both = (plan.prefill, plan.decode)
    ends = np.cumsum(np.concatenate([s.count for s in both]).astype(np.int64))
    slot = np.concatenate([s.slot for s in both])
    logits = np.concatenate([s.logits for s in both]).astype(np.int64)
    sample = np.concatenate([s.sample for s in both]).astype(np.int64)
    index = ragged(ends - logits, logits)
    last = np.cumsum(logits)
    return index, [
        np.repeat(slot, sample),
        ragged(last - sample, sample),
        np.repeat(slot, logits - sample),
        ragged(last - logits, logits - sample),
    ]


def verify_columns(plan: StepPlan, each: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int64 [decode rows, most drafts]: (number of the sample, merged row) of each draft; -1 pads the latter.

    A draft is the id of its merged row; the sample at the same position comes from the row before. ``each``:
    tokens that every row takes up, where rows of fewer are filled up.
    """
    count = plan.decode.count.astype(np.int64)
    place = np.arange(int(count.max(initial=1)) - 1)
    there = place < count[:, None] - 1
    before = np.cumsum(count) - count
    begins = np.arange(len(count)) * each if each else plan.prefill.tokens + before
    entries = int(plan.prefill.sample.sum()) + before[:, None] + np.where(there, place, 0)
    return entries, np.where(there, begins[:, None] + 1 + place, -1)
