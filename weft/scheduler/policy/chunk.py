"""Prompt tokens per step beside decode rows, limited by ``--itl-target-ms``.

The time between two tokens of a running sequence is the time of a step. With a target, each chunk is the
largest chunk for which the predicted time of the whole step stays within the target.

* Prefill never starves: a step takes at least ``FLOOR_TOKENS`` prompt tokens while there are any, even if
  decode rows alone exceed the target.
* A step without decode rows delays nobody, so only the token budget limits the step.
* First come, first served holds: after a cut chunk, no later sequence gets prompt tokens.
"""

from __future__ import annotations

from weft.scheduler.policy.fit import CostFitter
from weft.scheduler.policy.step_cost import CostModel, StepShape, shape_of
from weft.types.plan import StepPlan

FLOOR_TOKENS = 16
"""Minimum prompt tokens of a step, whatever the target."""


class ChunkPolicy:
    """Sizes the chunks of each step and learns from measured times.

    For each plan: ``begin`` with the decode rows, then ``room`` for each prefill row in order, and ``took``
    if the row was made. ``observe`` may come at any time.
    """

    def __init__(self, target: float, fitter: CostFitter | None = None) -> None:
        """``target``: maximum seconds of a step, > 0."""
        self.target = target
        self._fitter = fitter or CostFitter()
        self._shape = StepShape()
        self._cut = False
        self._spent = False

    @property
    def cost(self) -> CostModel:
        """The current cost model."""
        return self._fitter.model

    def begin(self, decode: StepShape) -> None:
        """Start a new step with the decode rows ``decode`` only."""
        self._shape = decode
        self._cut = self._spent = False

    def room(self, start: int, most: int) -> int:
        """Return the number of tokens, at most ``most``, for a chunk from position ``start`` in the step."""
        self._cut = False
        if not self._shape.decode_rows or most <= 0:
            return max(most, 0)
        if self._spent:
            return 0
        floor = min(max(FLOOR_TOKENS - self._shape.prefill_tokens, 0), most)
        fits = self._largest(start, floor, most)
        self._cut = fits < most
        self._spent = not fits  # later sequences must not pass a sequence that did not fit
        return fits

    def took(self, start: int, count: int) -> None:
        """Add a prefill row of ``count`` tokens from ``start`` to the step."""
        self._shape = self._shape.with_chunk(start, count)
        self._spent = self._spent or self._cut

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record the measured ``seconds`` of ``plan`` in the cost model."""
        self._fitter.observe(shape_of(plan), seconds)

    def _largest(self, start: int, low: int, high: int) -> int:
        """Return the largest count in ``low .. high`` predicted to fit; ``low`` if none fits. Binary
        search."""
        cost = self._fitter.model
        shape = self._shape
        target = self.target
        if cost.predict(shape.with_chunk(start, high)) <= target:
            return high
        high -= 1
        while low < high:
            middle = (low + high + 1) // 2
            if cost.predict(shape.with_chunk(start, middle)) <= target:
                low = middle
            else:
                high = middle - 1
        return low
