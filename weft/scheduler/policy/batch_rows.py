"""Keep sequences of batches short in steps that online sequences wait for.

A step lasts as long as its rows need. The first token of an online sequence waits for the step that runs at
its arrival, and for the steps of its own prompt. Rows of batches lengthen all of these steps:

    step                                            rows of batches
    an online prompt is computed                    none, except in each ``EVERY``-th such step
    other steps, until RECENT steps after online    decode rows, and ``BESIDE`` prompt tokens
    later                                           no bound
"""

from __future__ import annotations

EVERY = 8
"""Batches would starve on a server with an online prompt in every step."""
BESIDE = 64
"""Maximum prompt tokens of batches in a step soon after online work."""
RECENT = 1024
"""Steps after the last step with an online sequence. The next online request may come at any time."""


class BatchRows:
    """The bound of one scheduler. For each plan: ``begin``; then ``room`` for each chunk of a batch, and
    ``took`` for each chunk.

    An online prompt may have to wait for a slot or memory of a sequence of a batch. So batches do not pause
    while the last plan had no chunk of an online prompt.
    """

    def __init__(self, least: int) -> None:
        """``least``: tokens of the shortest useful chunk. A smaller bound would let no prompt go on."""
        self._most = max(least, BESIDE)
        self._left = self._recent = self._steps = 0
        self._prompt = self._served = False
        """Facts about the last plan: an online prompt waited or was prefilled; the plan has a chunk of an
        online prompt."""
        self.pauses = False
        """True if the plan has no rows of batches."""

    def begin(self, online: bool, prompt: bool) -> None:
        """Start a plan. ``online``: an online sequence runs or waits; ``prompt``: with tokens to prefill."""
        stuck = self._prompt and not self._served
        self._prompt, self._served = prompt, False
        self._recent = RECENT if online else max(self._recent - 1, 0)
        self._steps = self._steps + 1 if prompt and not stuck else 0
        self.pauses = self._steps % EVERY != 0
        self._left = self._most

    def room(self, most: int) -> int:
        """Return the number of tokens, at most ``most``, for a chunk of a batch."""
        if self.pauses:
            return 0
        return min(most, max(self._left, 0)) if self._recent else most

    def took(self, count: int, batch: bool) -> None:
        """Count a chunk of ``count`` tokens, of a batch or of an online prompt."""
        self._left -= count if batch else 0
        self._served = self._served or not batch
