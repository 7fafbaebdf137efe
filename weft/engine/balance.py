"""When experts move: once in so many steps, at the same one in every replica of a domain."""

from __future__ import annotations

import msgspec

from weft.types.plan import Rebalance, StepPlan


class Balance:
    """Of one engine. The first replica whose time has come decides for its domain."""

    def __init__(self, interval: int) -> None:
        """``interval``: steps; 0 for never."""
        self._interval = interval
        self._steps = 0
        self.asked = 0
        """Steps launched with a ``Rebalance``."""

    def ask(self, plan: StepPlan) -> StepPlan:
        """``plan``, and with it a ``Rebalance`` where it is time."""
        due = 0 < self._interval <= self._steps
        return with_rebalance(plan) if due else plan

    def launched(self, plan: StepPlan) -> None:
        """``plan`` is final."""
        self._steps += 1
        if rebalances(plan):
            self._steps = 0
            self.asked += 1


def rebalances(plan: StepPlan) -> bool:
    """Whether experts move before the step."""
    return any(isinstance(op, Rebalance) for op in plan.ops)


def with_rebalance(plan: StepPlan) -> StepPlan:
    """The plan with such an op, which it has once."""
    if rebalances(plan):
        return plan
    return msgspec.structs.replace(plan, ops=(*plan.ops, Rebalance()))
