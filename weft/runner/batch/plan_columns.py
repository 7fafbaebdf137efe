"""Host columns of a plan as needed by a step: the row of each token, and the rows with logits."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from weft.types.plan import Segment, StepPlan

Column = TypeVar("Column")
"""A column: an int64 array on the host, or an int64 tensor on the device."""


class RowColumns(NamedTuple, Generic[Column]):
    """The rows and tokens of a plan, prefill rows first."""

    slot: Column
    """[rows]"""
    tokens: Column
    """[rows]: tokens of each row."""
    row: Column
    """[T]: row of each token."""
    within: Column
    """[T]: place of each token in its row."""
    prefill_offsets: Column
    """[prefill rows + 1]: first token of each prefill row, and the number of tokens."""
    decode_offsets: Column
    """[decode rows + 1]: the same for decode rows."""


class LogitsColumns(NamedTuple, Generic[Column]):
    """The logits of a plan. A sampled entry draws a token; a prompt entry scores a token of the prompt."""

    merged_row: Column
    """[L]: merged rows with logits."""
    sampled_slot: Column
    """[sampled entries]"""
    sampled_row: Column
    """[sampled entries]: row of the logits."""
    prompt_slot: Column
    """[prompt entries]"""
    prompt_row: Column
    """[prompt entries]: row of the logits."""


def most_each(plan: StepPlan) -> int:
    """Return the largest token count of a row if the plan has decode rows only and every token samples; else
    0."""
    rows = plan.decode
    if plan.prefill.rows or not rows.rows:
        return 0
    most = int(rows.count.max())
    if rows.sample is rows.count and rows.logits is rows.count:  # the scheduler shares the arrays
        return most
    alike = (rows.logits == rows.count).all() and (rows.sample == rows.count).all()
    return most if alike else 0


def even(plan: StepPlan, each: int) -> bool:
    """Return True if every decode row has ``each`` tokens. ``each``: result of ``most_each``; 0 is never
    even."""
    return each == 1 or (each > 1 and int(plan.decode.count.min()) == each)


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return ranges in one int64 array: ``lengths[0]`` numbers from ``starts[0]`` on, and so on."""
    lengths = lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shift = starts.astype(np.int64) - (ends - lengths)
    result: np.ndarray = np.repeat(shift, lengths) + np.arange(total)
    return result


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return int64 [n + 1]: 0 and the running sums of ``lengths``."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def row_columns(prefill: Segment, decode: Segment) -> RowColumns[np.ndarray]:
    """Return the columns of the rows and tokens of both segments."""
    count = np.concatenate([prefill.count, decode.count])
    return RowColumns(
        slot=np.concatenate([prefill.slot, decode.slot]),
        tokens=count,
        row=np.repeat(np.arange(len(count)), count),
        within=ragged(np.zeros(len(count)), count),
        prefill_offsets=offsets_of(prefill.count),
        decode_offsets=offsets_of(decode.count),
    )


def logits_columns(plan: StepPlan) -> LogitsColumns[np.ndarray]:
    """Return the columns of the logits of ``plan``."""
    both = (plan.prefill, plan.decode)
    ends = np.cumsum(np.concatenate([s.count for s in both]).astype(np.int64))
    # [rows]: slot, number of logits, number of samples. The last tokens of a row have logits; the last logits
    # are sampled.
    slot = np.concatenate([s.slot for s in both])
    logits = np.concatenate([s.logits for s in both]).astype(np.int64)
    sample = np.concatenate([s.sample for s in both]).astype(np.int64)
    index = ragged(ends - logits, logits)
    last = np.cumsum(logits)
    return LogitsColumns(
        merged_row=index,
        sampled_slot=np.repeat(slot, sample),
        sampled_row=ragged(last - sample, sample),
        prompt_slot=np.repeat(slot, logits - sample),
        prompt_row=ragged(last - logits, logits - sample),
    )


def verify_columns(plan: StepPlan, each: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return two int64 [decode rows, most drafts]: sample index and merged row of each draft; -1 pads merged
    rows.

    The id of a draft is at its merged row. The sample to compare with comes from the preceding row. ``each``:
    tokens per padded row; 0 for rows without padding.
    """
    count = plan.decode.count.astype(np.int64)
    place = np.arange(int(count.max(initial=1)) - 1)
    there = place < count[:, None] - 1
    before = np.cumsum(count) - count
    begins = np.arange(len(count)) * each if each else plan.prefill.tokens + before
    entries = int(plan.prefill.sample.sum()) + before[:, None] + np.where(there, place, 0)
    return entries, np.where(there, begins[:, None] + 1 + place, -1)
