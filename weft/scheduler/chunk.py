"""How many prompt tokens a step takes beside decode rows: ``--itl-target-ms``.

The time between two tokens of a running sequence is the time of a step. With a target, each chunk is as long
as the cost model allows: the largest for which the predicted time of the whole step stays within the target.

* Prefill never starves: a step takes at least ``FLOOR_TOKENS`` prompt tokens while there are any, also when
  decode alone is over the target.
* A step without decode rows has nobody to delay, and no limit but the budget.
* First come first served holds: when one sequence's chunk was cut short, no younger one gets any.
"""

from __future__ import annotations

from weft.scheduler.fit import CostFitter
from weft.scheduler.step_cost import CostModel, StepShape, shape_of
from weft.types.plan import StepPlan

FLOOR_TOKENS = 16
"""Prompt tokens that a step takes whatever the target says."""


class ChunkPolicy:
    """Sizes the chunks of one step after another, and learns from their times.

    For each plan: ``begin`` with its decode rows, then for each prefill row in FCFS order ``room``, and
    ``took`` if the row was made. ``observe`` may come at any time.
    """

    def __init__(self, target: float, fitter: CostFitter | None = None) -> None:
        """``target``: seconds of a step, > 0."""
        self.target = target
        self._fitter = fitter or CostFitter()
        self._shape = StepShape()
        self._cut = False
        self._spent = False

    @property
    def cost(self) -> CostModel:
        """The cost model as it is now."""
        return self._fitter.model

    def begin(self, decode: StepShape) -> None:
        """A new step, with the decode rows of ``decode`` and no others yet."""
        self._shape = decode
        self._cut = self._spent = False

    def room(self, start: int, most: int) -> int:
        """Tokens, ``most`` at most, that a chunk from position ``start`` may have in this step."""
        self._cut = False
        if not self._shape.decode_rows or most <= 0:
            return max(most, 0)
        if self._spent:
            return 0
        floor = min(max(FLOOR_TOKENS - self._shape.prefill_tokens, 0), most)
        fits = self._largest(start, floor, most)
        self._cut = fits < most
        self._spent = not fits  # younger ones must not pass by the one that did not fit
        return fits

    def took(self, start: int, count: int) -> None:
        """The step has a prefill row of ``count`` tokens from ``start``."""
        self._shape = self._shape.with_chunk(start, count)
        self._spent = self._spent or self._cut

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """``plan`` took ``seconds``."""
        self._fitter.observe(shape_of(plan), seconds)

    def _largest(self, start: int, low: int, high: int) -> int:
        """The largest count in ``low .. high`` that is predicted to fit, or ``low`` if none is."""
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
