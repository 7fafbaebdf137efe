"""Host columns of a plan as needed by a step, and their staging from host to device.

    host   | column | column | ...            pinned if the device is a GPU
             └── one copy ──┐
    device | column | column | ...            the same memory if the device is the CPU

Each step in flight owns its staging buffers. A buffer returns to the ring after the result of its step was
read. Until then no other step writes the buffer, so a running copy always sees complete columns. ``poison``
fills a recycled buffer with invalid indices, so that a step that still reads the buffer fails.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.runner.event_wait import wait_until
from weft.types.plan import PlannedRows, Segment, StepPlan

Column = TypeVar("Column")

TIMEOUT_S = 60.0
"""Maximum seconds of the last copy of a buffer."""
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


def most_each(plan: PlannedRows) -> int:
    """Return the largest token count of a row if the plan has decode rows only and every token samples; else
    0."""
    rows = plan.decode
    if plan.prefill.rows or not rows.rows:
        return 0
    most = int(rows.count.max())
    if rows.sample is rows.count and rows.logits is rows.count:  # the scheduler shares the arrays
        return most
    all_sample = (rows.logits == rows.count).all() and (rows.sample == rows.count).all()
    return most if all_sample else 0


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


POISON = -(1 << 62)


class StagingBuffer:
    """int64 columns of one step, appended on the host and copied to the device at once.

    Views returned by ``tensor`` are valid until the buffer is released.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        """Allocate memory for ``capacity`` int64 numbers; pinned and with a copy on the device if the device
        is a GPU."""
        self._device = device
        self._cuda = device.type == "cuda"
        self._allocate(capacity)
        self._used = 0
        self._there = self._on_device
        """Device memory of the last upload."""
        self._event = torch.cuda.Event() if self._cuda else None

    def _allocate(self, capacity: int) -> None:
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=self._cuda)
        self._numpy = self._host.numpy()
        self._on_device = torch.empty_like(self._host, device=self._device) if self._cuda else self._host

    def begin(self, total: int) -> None:
        """Empty the buffer and make room for ``total`` entries."""
        if total > len(self._numpy):
            self._allocate(max(total, 2 * len(self._numpy)))
        self._used, self._there = 0, self._on_device

    def add(self, column: np.ndarray) -> slice:
        """Append a column and return its slice for ``tensor``. Raises EngineDead beyond the capacity."""
        end = self._used + len(column)
        if end > len(self._numpy):
            raise EngineDead("a step staged more numbers than it reserved")
        where = slice(self._used, end)
        self._numpy[where] = column
        self._used = end
        return where

    def upload(self, to: torch.Tensor | None = None) -> None:
        """Start the copy to the device. No copy is needed on a CPU without ``to``.

        ``to``: int64 memory on the device that takes the columns instead of the buffer's own. ``to`` stays in
        use until the next step writes it. Raises EngineDead if the columns do not fit.
        """
        self._there = self._on_device if to is None else to
        if self._used > len(self._there):
            raise EngineDead("a step staged more numbers than its capture can read")
        if self._cuda or to is not None:
            self._there[: self._used].copy_(self._host[: self._used], non_blocking=True)
        if self._event is not None:
            self._event.record()

    def tensor(self, where: slice) -> torch.Tensor:
        """Return the int64 view of a column on the device. Call after ``upload``."""
        return self._there[where]

    def wait(self, deadline: float) -> None:
        """Wait until no copy reads the host memory. Raises EngineDead after ``deadline`` (monotonic
        seconds)."""
        event = self._event
        if event is not None:
            wait_until(lambda: event.query(), deadline, "a staging copy did not finish in time")

    @torch.inference_mode()  # a buffer that grew is a tensor of inference mode: writes need the mode
    def poison(self) -> None:
        """Overwrite the buffer on host and device, so that any later use is noticed."""
        self._host.fill_(POISON)
        self._on_device.fill_(POISON)


class StagingRing:
    """Ring of staging buffers, one per step in flight."""

    def __init__(self, device: torch.device, depth: int, *, poison: bool = False) -> None:
        self._make = lambda: deque(StagingBuffer(device, 4096) for _ in range(depth))
        self._free = self._make()
        self._poison = poison

    def acquire(self) -> StagingBuffer:
        """Take a free buffer out of the ring, after the last copy of the buffer has ended. The caller calls
        ``begin``, and later ``release``.

        Raises EngineDead if more steps are in flight than the ring has buffers, or if the last copy does not
        end within ``TIMEOUT_S``.
        """
        if not self._free:
            raise EngineDead("more steps in flight than staging buffers")
        buffer = self._free.popleft()
        buffer.wait(time.monotonic() + TIMEOUT_S)
        return buffer

    def clear(self) -> None:
        """Replace all buffers by new buffers, because failed steps never release their buffers."""
        self._free = self._make()

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer after the result of its step was read."""
        if self._poison:
            buffer.wait(time.monotonic() + TIMEOUT_S)
            buffer.poison()
        self._free.append(buffer)
