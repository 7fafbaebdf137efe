"""When experts move: once in so many steps, at the same one in every replica of a domain."""

from __future__ import annotations

from weft.scheduler.plan_builder import PlanBuilder
from weft.types.plan import Rebalance, StepPlan


class Balance:
    """When experts of one engine move. The first replica whose time has come decides for its domain."""

    def __init__(self, interval: int) -> None:
        """``interval``: steps; 0 for never."""
        self._interval = interval
        self._steps = 0
        self.asked = 0
        """Steps launched with a ``Rebalance``."""

    def ask(self, builder: PlanBuilder) -> None:
        """Has experts move before the step where it is time."""
        builder.rebalance = 0 < self._interval <= self._steps

    def launched(self, plan: StepPlan) -> None:
        """``plan`` is final."""
        self._steps += 1
        if any(isinstance(op, Rebalance) for op in plan.ops):
            self._steps = 0
            self.asked += 1
