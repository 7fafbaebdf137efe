"""What drafts have cost beyond what the same tokens would have cost without, and how much more they may.

Every step with drafts and no prompts is set against plain steps: the tokens it made, at the price of a
plain step of as many rows as measured here. What it took beyond that, op by op or capture included, is
loss; what it saved makes up for loss. Drafts are allowed while the loss so far and what another try is
expected to lose stay within a share of the time that steps took; that holds for all steps together, and for
those of each size of batch. The first size may lose some steps' worth in any case, so that a first try is
possible at once where steps are of few rows. So whatever a cost model believes, and whatever a try costs,
drafts make an engine slower by no more than that share, but for those steps and for a try that turned out
worse than expected.

How much may be lost goes by what became of drafts lately: where none was right, half the share and few steps;
the whole of both from one right draft a row on.

What was gained is no credit: it only ever makes up for loss before it. Sums fade, so that an hour does not
pay for minutes of loss.

Pure: no clock, no randomness.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from weft.types.plan import StepPlan

SHARE = 0.02
"""Most of the time that drafts may lose, before the first and where one of a row is right; half of it where
none is, as a try may lose more than was expected of it: a capture is not foreseen."""
GRANT = 128
"""Plain steps that may be lost in any case with the first size of batch, if that is one row. Of more rows
less, by ``rows ** GRANT_FALLS``: the fewer, the likelier drafts pay, and the dearer is a capture beside a
step."""
LEAST_GRANT = 5
LEAST_GRANT_SECONDS = 0.05
"""The same where no draft was right, the larger of both: steps, and seconds. A capture takes tens of
milliseconds whatever a step takes, so of fast steps there must be many."""
RIGHT_KEEP = 0.97
"""How the number of right drafts fades, for each step that verified some."""
GRANT_FALLS = 5 / 3
GUESS = 2.0
"""Loss of a step with drafts before the first, in plain steps."""
AHEAD = 2
"""Steps that a try takes: one that drafts, one that verifies. Another under way is one more."""
HALF_LIFE = 120.0
"""Seconds of steps after which sums count half."""
LATEST = 8
"""Plain steps of as many rows behind other plain ones, whose median is their price."""
SETTLED = 4
"""Plain steps behind drafts that are no price: the first makes up for the drafter's entries, and until caches
hold what plain steps read they take up to twice as long."""
_WEIGHT = 0.3


@dataclass(slots=True)
class Account:
    """Of steps of some size of batch, or of all."""

    time: float = 0.0
    """Seconds."""
    loss: float = 0.0
    """Seconds lost by drafts; never below 0."""
    paused: float = 0.0
    """Of ``time``, what sums have not faded by yet."""
    expected: float = GUESS
    """Loss of a step with drafts, in plain steps; below 0 it gains."""

    def pause(self, seconds: float) -> None:
        """``spend`` without a loss, for the least time."""
        self.time += seconds
        self.paused += seconds

    def spend(self, seconds: float, lost: float = 0.0) -> None:
        keep = 0.5 ** ((seconds + self.paused) / HALF_LIFE)
        self.paused = 0.0
        self.time = keep * self.time + seconds
        self.loss = max(keep * self.loss + lost, 0.0)


def has_drafts(plan: StepPlan) -> bool:
    """Whether decode rows of the plan verify or propose any."""
    decode = plan.decode
    return bool(decode.rows and (decode.count.max() > 1 or decode.next_k.any()))


class DraftBudget:
    """Loss and allowance. For each step in order: ``step``; ``allows`` before each that would draft, and
    ``drafting`` if it does."""

    def __init__(self) -> None:
        self.all = Account()
        self.trials = 0.0
        """Seconds given to trials of what is not expected to be best."""
        self._sizes: dict[int, Account] = {}
        """By size of batch (powers of two)."""
        self._right = self._verified = 0.0
        """Drafts that were right, and rows that had some; fading."""
        self._under_way = 0
        """Steps that draft, of which nothing is known yet; 0 again at a settled plain step."""
        self._first = 0
        """The first size that was asked for."""
        self._plain: dict[int, deque[float]] = {}
        """By rows: the latest plain steps, in seconds."""
        self._behind = SETTLED
        """Steps without drafts in a row, so far. Before the first there were none to settle from."""
        self._prices: tuple[list[int], list[float]] | None = None
        """Rows, increasing, and the median of each; None when they are to be made again."""

    def plain(self, rows: int) -> float:
        """Seconds of a step of ``rows`` without drafts, between those measured; 0 before the first."""
        if not self._plain:
            return 0.0
        if self._prices is None:
            sizes = sorted(self._plain)
            self._prices = sizes, [float(np.median(self._plain[size])) for size in sizes]
        return float(np.interp(rows, *self._prices))

    @property
    def settled(self) -> bool:
        """Whether the last step, if it was plain, tells what plain steps take."""
        return self._behind > SETTLED

    @property
    def right(self) -> float:
        """Drafts of a row that were right lately, at most 1; 0 before the first."""
        return min(self._right / self._verified, 1.0) if self._verified else 0.0

    def of(self, rows: int) -> Account:
        """The account of steps of ``rows``."""
        size = rows.bit_length()
        account = self._sizes.get(size)
        if account is None:
            account = self._sizes[size] = Account()
        return account

    def step(self, plan: StepPlan, seconds: float, accepted: int, uncaptured: bool) -> None:
        """``plan`` took ``seconds``, and ``accepted`` of its drafts were right.

        ``uncaptured``: longer than others like it will. That is a loss all the same, but tells nothing of
        others.
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
            lost = seconds - price * (1.0 + accepted / rows)
            if not uncaptured:
                account.expected += _WEIGHT * (lost / price - account.expected)
        account.spend(seconds, lost)
        self.all.spend(seconds, lost)

    def drafting(self) -> None:
        """The step that was allowed proposes drafts."""
        self._under_way += 1

    def pause(self, rows: int, seconds: float) -> None:
        """``step`` of ``rows`` without drafts, for the least time: no price is taken from it."""
        self.all.pause(seconds)
        self.of(rows).pause(seconds)

    def allows(self, rows: int) -> bool:
        """Whether a step of ``rows`` may draft: as it is expected to go, no more is lost than may be."""
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
        """Plain steps of ``rows`` that may be lost in any case with the first size of batch."""
        most = float(GRANT / rows**GRANT_FALLS)
        least = min(max(LEAST_GRANT, LEAST_GRANT_SECONDS / self.plain(rows)), most)
        return least + (most - least) * self.right

    def allows_trial(self, rows: int, drafts: int) -> bool:
        """Whether ``drafts`` may be tried that are not expected to be best; if so, counts them."""
        if self.trials > SHARE * self.all.time or not self.allows(rows):
            return False
        self.trials += AHEAD * (1 + drafts) * self.plain(rows)
        return True
