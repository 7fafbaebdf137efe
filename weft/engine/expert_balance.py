"""Decides when experts move: once every N steps, before the same step in every replica of an expert-parallel
group.
"""

from __future__ import annotations

from weft.scheduler.plan_builder import PlanBuilder
from weft.types.plan import Rebalance, StepPlan


class Balance:
    """Rebalance timer of one engine. The first replica with an expired interval decides for the
    expert-parallel group.
    """

    def __init__(self, interval: int) -> None:
        """``interval``: steps between two rebalances; 0 disables rebalancing."""
        self._interval = interval
        self._steps = 0
        self.asked = 0
        """Number of launched steps with a ``Rebalance``."""

    def ask(self, builder: PlanBuilder) -> None:
        """Set ``builder.rebalance`` if the interval has passed."""
        builder.rebalance = 0 < self._interval <= self._steps

    def launched(self, plan: StepPlan) -> None:
        """Count the launched step. A step with a ``Rebalance`` restarts the interval."""
        self._steps += 1
        if any(isinstance(op, Rebalance) for op in plan.ops):
            self._steps = 0
            self.asked += 1
