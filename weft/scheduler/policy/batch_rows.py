"""Keep sequences of batches short in steps that online sequences wait for.

A step lasts as long as its rows need. The first token of an online sequence waits for the step that runs at
its arrival, and for the steps of its own prompt. Rows of batches lengthen all of these steps:

    step                                            rows of batches
    an online prompt is computed, or waits          none, except in each ``EVERY``-th such step
    other steps, until RECENT steps after online    decode rows, and ``BESIDE`` prompt tokens
    later                                           no bound
"""

from __future__ import annotations

EVERY = 8
"""Batches would starve on a server with an online prompt in every step."""
BESIDE = 64
RECENT = 1024
"""Steps after the last step with an online sequence. The next online request may come at any time."""


class BatchRows:
    """The bound of one scheduler. For each plan: ``begin``; then ``room`` and ``took`` for each chunk of a
    batch."""

    def __init__(self, least: int) -> None:
        """``least``: tokens of the shortest useful chunk. A smaller bound would let no prompt go on."""
        self._most = max(least, BESIDE)
        self._left = self._recent = self._steps = 0
        self.pauses = False
        """True if the plan has no rows of batches."""

    def begin(self, online: bool, prompt: bool) -> None:
        """Start a plan. ``online``: an online sequence runs or waits; ``prompt``: with tokens to prefill."""
        self._recent = RECENT if online else max(self._recent - 1, 0)
        self._steps = self._steps + 1 if prompt else 0
        self.pauses = self._steps % EVERY != 0
        self._left = self._most

    def room(self, most: int) -> int:
        """Return the number of tokens, at most ``most``, for a chunk of a batch."""
        if self.pauses:
            return 0
        return min(most, max(self._left, 0)) if self._recent else most

    def took(self, count: int) -> None:
        """Count a chunk of a batch."""
        self._left -= count
