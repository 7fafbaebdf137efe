"""Moving averages of draft acceptance: per slot for first drafts, per draft position for later drafts."""

from __future__ import annotations

import numpy as np

from weft.scheduler.slot_columns import SlotColumns

EXPECTED = 0.7
"""Assumed acceptance before the first draft."""
AT_ONCE = 8
"""Number of steps learned in one batch; learning one step costs as much as a small kernel."""
_SLOT_WEIGHT, _ALL_WEIGHT = 0.1, 0.02


class Acceptance:
    """The acceptance of drafts. The average of each slot is in ``columns.acceptance``."""

    def __init__(self, most: int, columns: SlotColumns) -> None:
        """``most``: maximum drafts per row."""
        self.expected = EXPECTED
        """Acceptance of first drafts over all sequences."""
        self.later = np.full(most - 1, EXPECTED)
        """[most - 1], acceptance of drafts 2, 3, .. after an accepted predecessor."""
        self.rose = False
        """True if first drafts were accepted more often than the average. The reader resets the flag."""
        self._columns = columns
        self._seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def enter(self, slot: int) -> None:
        """Reset the average of the slot to the overall average, for a new sequence."""
        self.learn()
        self._columns.acceptance[slot] = self.expected

    def see(self, slots: np.ndarray, drafts: np.ndarray, accepted: np.ndarray, *, now: bool = False) -> None:
        """Record rows with drafts: integers [rows], ``accepted <= drafts``. ``now``: learn at once, not in a
        batch."""
        self._seen.append((slots, drafts, accepted))
        if now or len(self._seen) >= AT_ONCE:
            self.learn()

    def learn(self) -> None:
        """Update all averages with the recorded rows."""
        if not self._seen:
            return
        slots, drafts, accepted = (np.concatenate(column) for column in zip(*self._seen, strict=True))
        self._seen.clear()
        hit = accepted > 0
        share = self._columns.acceptance
        times = np.bincount(slots, minlength=len(share))
        met = np.flatnonzero(times)
        right = np.bincount(slots, weights=hit)[met] / times[met]
        # n equal updates of a moving average, in closed form.
        share[met] += (1.0 - (1.0 - _SLOT_WEIGHT) ** times[met]) * (right - share[met])
        mean = float(hit.mean())
        self.rose = self.rose or mean > self.expected
        self.expected += _weight(len(hit)) * (mean - self.expected)
        for place in range(1, len(self.later) + 1):
            seen = (drafts > place) & (accepted >= place)
            if seen.any():
                share_of = float((accepted[seen] > place).mean())
                self.later[place - 1] += _weight(int(seen.sum())) * (share_of - self.later[place - 1])

    def chain(self) -> np.ndarray:
        """Return float64 [most]: acceptance probability of each draft position if the first draft is
        accepted."""
        result: np.ndarray = np.cumprod(np.concatenate([[1.0], self.later]))
        return result


def _weight(count: int) -> float:
    """Return the weight of the mean of ``count`` observations against all earlier observations."""
    return float(1.0 - (1.0 - _ALL_WEIGHT) ** count)
