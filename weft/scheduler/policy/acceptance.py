"""Moving averages of draft acceptance: per slot for first drafts, per draft position for later drafts."""

from __future__ import annotations

import numpy as np

from weft.scheduler.slot_columns import SlotColumns

EXPECTED, PRIOR = 0.7, 8
"""Assumed acceptance before the first draft, and number of drafts that count as much."""
AT_ONCE = 8
"""Number of steps learned in one batch; learning one step costs as much as a small kernel."""
MEMORY = 50
"""Number of drafts that earlier drafts count at most."""
_SLOT_WEIGHT = 0.1


class Acceptance:
    """The acceptance of drafts. ``columns.acceptance`` has the difference of each slot from the average."""

    def __init__(self, most: int, columns: SlotColumns) -> None:
        """``most``: maximum drafts per row."""
        self.most = most
        self._share = np.full(most, EXPECTED)
        """[most], acceptance of drafts 1, 2, .. over all sequences, after an accepted predecessor."""
        self._met = np.full(most, PRIOR)
        """[most], number of drafts in ``_share``, at most ``MEMORY``."""
        self._columns = columns
        self._seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def enter(self, slot: int) -> None:
        """Forget the last sequence of the slot."""
        self.learn()
        self._columns.acceptance[slot] = 0.0

    def see(self, slots: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Record rows with drafts: integers [rows], ``accepted <= drafts``."""
        self._seen.append((slots, drafts, accepted))
        if len(self._seen) >= AT_ONCE:
            self.learn()

    def learn(self) -> None:
        """Update all averages with the recorded rows."""
        if not self._seen:
            return
        slots, drafts, accepted = (np.concatenate(column) for column in zip(*self._seen, strict=True))
        self._seen.clear()
        for place in range(self.most):
            seen = (drafts > place) & (accepted >= place)
            count = int(seen.sum())
            if count:
                weight = count / (count + self._met[place])
                self._share[place] += weight * (float((accepted[seen] > place).mean()) - self._share[place])
                self._met[place] = min(self._met[place] + count, MEMORY)
        beyond = self._columns.acceptance
        times = np.bincount(slots, minlength=len(beyond))
        met = np.flatnonzero(times)
        right = np.bincount(slots, weights=accepted > 0)[met] / times[met] - self._share[0]
        # n equal updates of a moving average, in closed form.
        beyond[met] += (1.0 - (1.0 - _SLOT_WEIGHT) ** times[met]) * (right - beyond[met])

    def chances(self, slots: np.ndarray) -> np.ndarray:
        """Return float64 [rows, most]: probability that each draft of a row is accepted."""
        first = np.clip(self._share[0] + self._columns.acceptance[slots], 0.0, 1.0)
        result: np.ndarray = first[:, None] * np.cumprod(np.concatenate([[1.0], self._share[1:]]))
        return result
