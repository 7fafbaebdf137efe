"""The loss by drafts, compared with the same tokens without drafts, and the allowed loss.

Every step with drafts and without prompts is compared with plain steps. The tokens of the step are priced at
a measured plain step with as many rows. Time beyond the price is loss, including capture or slow operators;
time below the price reduces the loss. Drafts are allowed while the loss so far plus the expected loss of
another try stays within a share of the total step time. The limit holds for all steps together and per batch
size. The first batch size may lose some plain steps in any case: the grant. With the grant, an engine with
few rows can try drafts at once. So drafts slow an engine by no more than the share, except for the grant and
a try worse than expected, whatever the cost model predicts.

The allowed loss depends on recent acceptance: half the share and a small grant without accepted drafts, the
full amounts from one accepted draft per row on.

A gain is no credit: a gain only reduces earlier loss. Sums decay, so an hour of gain does not pay for minutes
of loss.

Pure: no clock, no randomness.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from weft.types.plan import StepPlan

SHARE = 0.02
"""Maximum share of step time that drafts may lose, before the first draft and with one accepted draft per
row. Half of the share without accepted drafts, because a try may lose more than expected: captures are not
foreseen."""
GRANT = 128
"""Plain steps that the first batch size may lose in any case, for one row. Divided by ``rows **
GRANT_FALLS``: with fewer rows drafts pay more often, and a capture is longer relative to a step."""
LEAST_GRANT = 5
LEAST_GRANT_SECONDS = 0.05
"""The grant without accepted drafts, in steps and in seconds; the larger applies. A capture takes tens of
milliseconds, so fast steps need a grant of many steps."""
RIGHT_KEEP = 0.97
"""Decay of the acceptance sums per step with verified drafts."""
GRANT_FALLS = 5 / 3
GUESS = 2.0
"""Expected loss of the first step with drafts, in plain steps."""
AHEAD = 2
"""Steps of a try: one step proposes and one step verifies. Each further step in flight adds one."""
HALF_LIFE = 120.0
"""Half-life of the sums, in seconds of step time."""
LATEST = 8
"""Number of latest settled plain steps per row count; the price is the median."""
SETTLED = 4
"""Plain steps after drafts without use as a price. The first step also fills the drafter's cache, and plain
steps take up to twice as long until caches hold the data of plain steps."""
_WEIGHT = 0.3


@dataclass(slots=True)
class Account:
    """The account of one batch size class, or of all steps."""

    time: float = 0.0
    """Decayed sum of step time in seconds."""
    loss: float = 0.0
    """Decayed sum of seconds lost by drafts; never below 0."""
    paused: float = 0.0
    """Part of ``time`` without decay applied yet."""
    expected: float = GUESS
    """Expected loss of a step with drafts, in plain steps; a negative value is a gain."""

    def pause(self, seconds: float) -> None:
        """Record ``seconds`` without loss and defer the decay; cheaper than ``spend``."""
        self.time += seconds
        self.paused += seconds

    def spend(self, seconds: float, lost: float = 0.0) -> None:
        keep = 0.5 ** ((seconds + self.paused) / HALF_LIFE)
        self.paused = 0.0
        self.time = keep * self.time + seconds
        self.loss = max(keep * self.loss + lost, 0.0)


def has_drafts(plan: StepPlan) -> bool:
    """Return True if a decode row of the plan verifies or proposes drafts."""
    decode = plan.decode
    return bool(decode.rows and (decode.count.max() > 1 or decode.next_k.any()))


class DraftBudget:
    """The ledger of losses and the allowance.

    For each step in order: ``allows`` before a step with drafts, ``drafting`` if the step drafts, and
    ``step`` with the measured time.
    """

    def __init__(self) -> None:
        self.all = Account()
        self.trials = 0.0
        """Seconds spent on trials with a worse expectation than the best choice."""
        self._sizes: dict[int, Account] = {}
        """Batch size class (power of two) -> account."""
        self._right = self._verified = 0.0
        """Decayed sums: accepted drafts, and rows with verified drafts."""
        self._under_way = 0
        """Number of drafting steps without a measured time; reset at a settled plain step."""
        self._first = 0
        """The first batch size class passed to ``allows``."""
        self._plain: dict[int, deque[float]] = {}
        """Number of rows -> seconds of the latest plain steps."""
        self._behind = SETTLED
        """Number of consecutive plain steps. Starts as settled."""
        self._prices: tuple[list[int], list[float]] | None = None
        """(row counts in ascending order, median seconds); None when outdated."""

    def plain(self, rows: int) -> float:
        """Return the seconds of a plain step of ``rows``, interpolated between measured sizes; 0 before the
        first."""
        if not self._plain:
            return 0.0
        if self._prices is None:
            sizes = sorted(self._plain)
            self._prices = sizes, [float(np.median(self._plain[size])) for size in sizes]
        return float(np.interp(rows, *self._prices))

    @property
    def settled(self) -> bool:
        """True if enough plain steps precede: the time of a plain step is then a price."""
        return self._behind > SETTLED

    @property
    def right(self) -> float:
        """Recently accepted drafts per row, at most 1; 0 before the first."""
        return min(self._right / self._verified, 1.0) if self._verified else 0.0

    def of(self, rows: int) -> Account:
        """Return the account of the batch size class of ``rows``."""
        size = rows.bit_length()
        account = self._sizes.get(size)
        if account is None:
            account = self._sizes[size] = Account()
        return account

    def step(self, plan: StepPlan, seconds: float, accepted: int, uncaptured: bool) -> None:
        """Record the ``seconds`` of ``plan`` and the number of accepted drafts.

        ``uncaptured``: the step took longer than later equal steps will. The time counts as loss, but changes
        no expectation and no price.
        """
        decode = plan.decode
        lost = 0.0
        rows = decode.rows
        if decode.next_k.any():
            self._under_way = max(self._under_way - 1, 0)
        verified = int((decode.count > 1).sum())
        if verified:
            self._right = RIGHT_KEEP * self._right + accepted
            self._verified = RIGHT_KEEP * self._verified + verified
        # A step with prompts has no plain price: count only the time.
        if not rows or plan.prefill.rows:
            if plan.prefill.next_k.any() or has_drafts(plan):
                self._behind = 0
            self.all.spend(seconds)
            return
        account = self.of(rows)
        plain = not has_drafts(plan)
        self._behind = self._behind + 1 if plain else 0
        if plain:
            if self.settled:
                self._under_way = 0
            if self.settled and not uncaptured:
                self._plain.setdefault(rows, deque(maxlen=LATEST)).append(seconds)
                self._prices = None
        elif price := self.plain(rows):
            lost = seconds - price * (1.0 + accepted / rows)  # price of 1 + accepted / rows plain steps
            if not uncaptured:
                account.expected += _WEIGHT * (lost / price - account.expected)
        account.spend(seconds, lost)
        self.all.spend(seconds, lost)

    def drafting(self) -> None:
        """Count a step with proposed drafts in flight."""
        self._under_way += 1

    def pause(self, rows: int, seconds: float) -> None:
        """Record a plain step of ``rows`` cheaply, without use as a price."""
        self.all.pause(seconds)
        self.of(rows).pause(seconds)

    def allows(self, rows: int) -> bool:
        """Return True if a step of ``rows`` may draft: the loss with the expected further loss stays within
        limits."""
        price = self.plain(rows)
        if not price:
            return False
        account = self.of(rows)
        ahead = (AHEAD + self._under_way) * max(account.expected, 0.0) * price
        self._first = self._first or rows.bit_length()
        granted = self._granted(rows) * price if rows.bit_length() == self._first else 0.0
        share = SHARE * (1.0 + self.right) / 2.0 if self._verified else SHARE
        return all(of.loss + ahead <= max(share * of.time, granted) for of in (account, self.all))

    def _granted(self, rows: int) -> float:
        """Return the grant of the first batch size, in plain steps of ``rows``."""
        most = float(GRANT / rows**GRANT_FALLS)
        least = min(max(LEAST_GRANT, LEAST_GRANT_SECONDS / self.plain(rows)), most)
        return least + (most - least) * self.right

    def allows_trial(self, rows: int, drafts: int) -> bool:
        """Return True, and count the trial, if ``drafts`` drafts may be tried although not expected to be
        best."""
        if self.trials > SHARE * self.all.time or not self.allows(rows):
            return False
        self.trials += AHEAD * (1 + drafts) * self.plain(rows)
        return True
