"""The number of drafts per sequence: propose a draft where its acceptance pays its measured time.

Speculation never changes a token, only the number of tokens per step. The rule compares three measured
numbers:

    plain    seconds of a step without drafts, by number of rows
    extra    seconds that one verified draft adds to a step, by batch size class and longest row
    chance   probability that a draft is accepted, by slot and draft position (``Acceptance``)

A draft pays if ``chance / extra`` is above the tokens per second of the step. A class of batch sizes (powers
of two) is in one of three phases:

    plain steps ──► try: equal numbers of drafts ──► drafts that pay
         ▲                                               │ no draft pays
         └──────────── pause: no drafts ◄────────────────┘

The first try has the maximum number of drafts, each further try half as many, and the try behind 1 draft has
the maximum again.

A pause is so long that the time lost since the try is ``SHARE`` of the pause. Captures of new steps count as
lost time, too. Pauses double while tries fail. A stall of the machine is no price of drafts: ``STALL`` bounds
the lost time of one step, and ``LONGEST_PAUSE`` bounds a pause. Pure: no clock, no randomness.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from weft.scheduler.policy.acceptance import Acceptance
from weft.scheduler.slot_columns import SlotColumns
from weft.types.plan import StepPlan

PLAINS = 4
"""Number of measured plain steps before the first try of a batch size class."""
TRY, LONGEST_TRY = 2, 12
"""Number of steps with a usable time in a try, and maximum number of steps."""
UNLIKE = 0.5
"""A row without drafts beside rows with drafts has a first draft with less than this share of the average
chance."""
HOPELESS, ENOUGH = 0.2, 8
"""A try ends at once if at least ``ENOUGH`` rows have on average fewer than ``HOPELESS`` accepted drafts."""
SHARE = 0.0075
"""Time lost by a failed try, as a share of the pause behind the try."""
SHORTEST_PAUSE = 32
"""Minimum length of a pause, in plain steps."""
LONGEST_PAUSE, LONGEST_PAUSE_STEPS = 60.0, 1024
"""Maximum length of a pause: seconds or plain steps, whichever is longer."""
STALL = 100
"""A step that loses more than so many plain steps is a stall. Only so many plain steps count as lost, and the
time of the step is not usable."""
DOUBLINGS = 2
"""Number of failed tries in a row after which pauses grow no longer."""
PLAIN_EVERY, PLAIN_STEPS = 512, 9
"""Period and number of steps without drafts, to measure ``plain`` again."""
SETTLED = 4
"""Plain steps after drafts without a use for ``plain``: the steps fill the drafter's cache."""
LATEST = 8
"""Number of latest times; the result is the median."""
HOLD = 8
"""Number of steps between two computations of the draft counts, and between two looks during a pause."""
PROBE_EVERY = 32
"""A row without drafts beside rows with drafts proposes one draft in one of so many steps."""
WORTH = 1.02
"""Minimum ratio of expected tokens per second with drafts to tokens per second without drafts."""


@dataclass(slots=True)
class _Size:
    """The state of one batch size class."""

    limit: int
    """Number of drafts of each row in the present or next try."""
    plains: int = 0
    """Number of measured plain steps."""
    tried: int = 0
    """Number of steps of the present try; ``LONGEST_TRY`` after its end."""
    extra: dict[int, deque[float]] = field(default_factory=dict)
    """Maximum number of drafts of a row -> latest values of ``extra``."""
    rows: int = 0
    """Number of rows with verified drafts since the try began."""
    accepted: int = 0
    """Number of accepted drafts of these rows."""
    lost: float = 0.0
    """Seconds lost by drafts since the try began, compared with plain steps."""
    until: float = 0.0
    """End of the pause, in seconds of step time."""
    failed: int = 0
    """Number of failed tries in a row."""


def has_drafts(plan: StepPlan) -> bool:
    """Return True if a decode row of the plan verifies or proposes drafts."""
    decode = plan.decode
    return bool(decode.rows and (decode.count.max() > 1 or decode.next_k.any()))


class DraftPolicy:
    """Chooses ``next_k`` for the rows of each plan.

    For each plan: ``choose`` for decode rows, then ``first`` for each sampling prefill row. ``verified`` when
    the result commits, then ``observe`` when the time is known.
    """

    def __init__(self, most: int, adaptive: bool, columns: SlotColumns) -> None:
        """``most``: maximum drafts per row, >= 1. Without ``adaptive``, every row gets the maximum."""
        self.most = most
        self.adaptive = adaptive
        self._columns = columns
        self._shares = Acceptance(most, columns)
        self._sizes: dict[int, _Size] = {}
        """Batch size class -> state."""
        self._plain: dict[int, deque[float]] = {}
        """Number of rows -> seconds of the latest plain steps."""
        self._medians: dict[int, float] = {}
        """Number of rows -> median of the latest plain steps."""
        self._measured: list[int] = []
        """Keys of ``_medians``, in rising order."""
        self._now = 0
        """Number of drafts of a sequence without history."""
        self._accepted = 0
        """Number of accepted drafts in the last committed step."""
        self._steps = self._next = self._rest = 0
        """Number of choices, the choice that computes the counts again, and number of idle plans left."""
        self._behind = SETTLED
        """Number of plain steps in a row."""
        self._time = 0.0
        """Seconds of all steps."""

    def enter(self, slot: int) -> None:
        """Reset the acceptance and the draft count of ``slot`` for a new sequence."""
        self._shares.enter(slot)
        self._columns.wanted[slot] = self._now

    def idle(self) -> bool:
        """Return True if the next plan has no drafts and needs no choice: do not call ``choose`` then.

        Call at most once per plan: each True uses up one plan of the pause.
        """
        self._rest -= self._rest > 0
        return self._rest > 0

    def choose(self, slots: np.ndarray, starts: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Return int32 [rows]: number of drafts to propose in each decode row, at most ``room``.

        slots, starts (positions) and room: integers [rows]. The drafts are verified in the next step.
        """
        most: np.ndarray = np.minimum(room, self.most).astype(np.int32)
        rows = len(slots)
        if not self.adaptive or not rows:
            return most
        size = self._sizes.setdefault(rows.bit_length(), _Size(self.most))
        self._steps += 1
        paused = self._time < size.until
        # A new class measures plain steps first. A class with drafts measures plain steps again now and then.
        if paused or size.plains < PLAINS or self._steps % PLAIN_EVERY < PLAIN_STEPS:
            return self._none(rows, paused)
        chosen: np.ndarray
        if size.tried < LONGEST_TRY:
            size.tried += 1
            self._now = size.limit
            self._next = self._steps
            chosen = np.minimum(most, np.int32(size.limit))
            return chosen
        if self._steps >= self._next:
            self._next = self._steps + HOLD
            self._columns.wanted[slots] = wanted = self._paying(slots, size)
            if not wanted.any():
                self._pause(size, rows)
                return self._none(rows, paused=True)
            size.failed = 0
        wanted = self._columns.wanted[slots]
        least = int(self._steps % PROBE_EVERY == 0)
        chosen = np.minimum(np.maximum(wanted, least), most)
        return chosen

    def _none(self, rows: int, paused: bool) -> np.ndarray:
        """Return no drafts for any row."""
        self._now = 0
        self._next = self._steps
        self._rest = HOLD if paused else 0
        return np.zeros(rows, np.int32)

    def _pause(self, size: _Size, rows: int) -> None:
        """Begin a pause. The first choice after the pause begins a try."""
        plain = self.plain(rows)
        pause = max(size.lost / SHARE, SHORTEST_PAUSE * plain) * 2**size.failed
        size.until = self._time + min(pause, max(LONGEST_PAUSE, LONGEST_PAUSE_STEPS * plain))
        size.failed = min(size.failed + 1, DOUBLINGS)
        size.lost = 0.0
        size.tried = size.rows = size.accepted = 0
        size.limit = size.limit // 2 or self.most
        size.extra.pop(size.limit, None)

    def _paying(self, slots: np.ndarray, size: _Size) -> np.ndarray:
        """Return int32 [rows]: number of drafts that pay in each row; all 0 if no draft pays."""
        rows, plain = len(slots), self.plain(len(slots))
        self._shares.learn()
        chances = self._shares.chances(slots)
        able = chances[:, 0] >= UNLIKE * chances[:, 0].mean()
        gains = np.cumsum(chances[able].sum(axis=0))
        best, extra, self._now = WORTH * rows / plain, np.inf, 0
        for drafts in range(self.most, 0, -1):
            if drafts in size.extra:
                extra = max(float(np.median(size.extra[drafts])), 0.0)
            rate = (rows + gains[drafts - 1]) / (plain + extra * drafts * int(able.sum()))
            if rate > best:
                best, self._now = rate, drafts
        return np.where(able, np.int32(self._now), np.int32(0))

    def first(self, room: int) -> int:
        """Return the number of drafts to propose after a prompt, at most ``room``."""
        return min(room, self._now if self.adaptive else self.most)

    def verified(self, slots: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Record accepted drafts of rows with drafts: integers [rows], ``accepted <= drafts``."""
        if self.adaptive and len(slots):
            self._accepted = int(accepted.sum())
            self._shares.see(slots, drafts, accepted)

    def observe(self, plan: StepPlan, seconds: float, uncaptured: bool = False) -> None:
        """Record the ``seconds`` of ``plan``. Does nothing unless ``adaptive``.

        ``uncaptured``: the step took longer than later equal steps will. The time only counts as lost.
        """
        accepted, self._accepted = self._accepted, 0
        if not self.adaptive:
            return
        self._time += seconds
        rows, drafts = plan.decode.rows, has_drafts(plan)
        # Steps with prompts take longer for other reasons.
        if plan.prefill.rows or not rows:
            if drafts or plan.prefill.next_k.any():
                self._behind = 0
            return
        size = self._sizes.setdefault(rows.bit_length(), _Size(self.most))
        if not drafts:
            self._behind += 1
            if self._behind > SETTLED and seconds > 0.0 and not uncaptured:
                size.plains += 1
                self._measure(rows, seconds)
            return
        self._behind = 0
        plain = self.plain(rows)
        lost = seconds - plain * (1.0 + accepted / rows)
        stalled = lost > STALL * plain
        size.lost += min(lost, STALL * plain)
        verified = plan.decode.tokens - rows
        size.rows += int((plan.decode.count > 1).sum())
        size.accepted += accepted
        if size.rows >= ENOUGH and size.accepted < HOPELESS * size.rows:
            size.tried = LONGEST_TRY
        if verified and plan.decode.next_k.any() and not uncaptured and not stalled:
            extra = size.extra.setdefault(int(plan.decode.count.max()) - 1, deque(maxlen=LATEST))
            extra.append((seconds - plain) / verified)
            if len(extra) >= TRY:
                size.tried = LONGEST_TRY

    def _measure(self, rows: int, seconds: float) -> None:
        """Record the time of a plain step of ``rows``."""
        times = self._plain.get(rows)
        if times is None:
            times = self._plain[rows] = deque(maxlen=LATEST)
            insort(self._measured, rows)
        times.append(seconds)
        self._medians[rows] = median(times)

    def plain(self, rows: int) -> float:
        """Return the seconds of a plain step of ``rows``, interpolated between measured sizes; 0 before the
        first."""
        medians, measured = self._medians, self._measured
        if rows in medians or not measured:
            return medians.get(rows, 0.0)
        place = bisect(measured, rows)
        if place in (0, len(measured)):  # outside the measured sizes: the nearest size
            return medians[measured[max(place - 1, 0)]]
        below, above = measured[place - 1], measured[place]
        slope = (medians[above] - medians[below]) / (above - below)
        return medians[below] + slope * (rows - below)
