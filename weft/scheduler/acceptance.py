"""Running shares of drafts that were accepted: of each slot's first ones, and of later ones by place."""

from __future__ import annotations

import numpy as np

from weft.scheduler.slot_columns import SlotColumns

EXPECTED = 0.7
"""Share of drafts accepted, before the first."""
AT_ONCE = 8
"""Steps whose outcomes are taken in together: each takes as long as a small op."""
_SLOT_WEIGHT, _ALL_WEIGHT = 0.1, 0.02


class Acceptance:
    """Which share of drafts was accepted. The share of each slot is in ``columns.acceptance``."""

    def __init__(self, most: int, columns: SlotColumns) -> None:
        """``most``: drafts of a row."""
        self.expected = EXPECTED
        """Share of first drafts accepted, over all sequences."""
        self.later = np.full(most - 1, EXPECTED)
        """Share of drafts 2, 3, .. accepted where the one before was."""
        self.rose = False
        """Whether first drafts were accepted more often lately than before. The reader resets it."""
        self._columns = columns
        self._seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def enter(self, slot: int) -> None:
        """The slot has a new sequence, of which nothing is known."""
        self.learn()
        self._columns.acceptance[slot] = self.expected

    def see(self, slots: np.ndarray, drafts: np.ndarray, accepted: np.ndarray, *, now: bool = False) -> None:
        """Rows of a step that had some: integers [rows], ``accepted <= drafts``. They are kept; ``now``: and
        taken in at once."""
        self._seen.append((slots, drafts, accepted))
        if now or len(self._seen) >= AT_ONCE:
            self.learn()

    def learn(self) -> None:
        """Takes in what was seen."""
        if not self._seen:
            return
        slots, drafts, accepted = (np.concatenate(column) for column in zip(*self._seen, strict=True))
        self._seen.clear()
        hit = accepted > 0
        share = self._columns.acceptance
        times = np.bincount(slots, minlength=len(share))
        met = np.flatnonzero(times)
        right = np.bincount(slots, weights=hit)[met] / times[met]
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
        """float64 [most]: chance of each draft, where the first one is right."""
        result: np.ndarray = np.cumprod(np.concatenate([[1.0], self.later]))
        return result


def _weight(count: int) -> float:
    """Of the mean of ``count`` observations against all before them."""
    return float(1.0 - (1.0 - _ALL_WEIGHT) ** count)
