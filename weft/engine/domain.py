"""One replica's part in its domain: every plan is agreed with the other replicas before it is launched.

A domain is lost as a whole, and formed as a whole: when a rank of any replica is gone, communicators break in
all of them, each forms its group anew, and their heads meet for the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weft.engine.balance import rebalances, with_rebalance
from weft.group.types import GroupLost
from weft.overlap.split import larger_half
from weft.parallel.agreement import AgreementGroup
from weft.parallel.group import CommLost
from weft.scheduler.agreement import Vote, most_drafts
from weft.types.plan import StepPlan


class Domain:
    """Used from the thread that steps, or that forms the group; ``abort`` from any."""

    def __init__(self, group: AgreementGroup) -> None:
        self._group = group

    @property
    def awake(self) -> bool:
        """Whether the domain steps: then so must this replica, also without work of its own."""
        return self._group.awake

    @property
    def sockets(self) -> Sequence[Any]:
        """To poll while asleep."""
        return self._group.sockets

    def settle(
        self, plan: StepPlan | None, unfinished: bool, idle: Callable[[], StepPlan]
    ) -> StepPlan | None:
        """The plan to launch now: ``plan`` as agreed, or ``idle()``; None where no replica has rows.

        ``plan`` says in ``halves`` what this replica would like. ``unfinished``: whether sequences live or
        steps are in flight here. Raises GroupLost when a replica is gone or late, and EngineDead when
        replicas are not at the same step.
        """
        try:
            decision = self._group.agree(vote_of(plan, unfinished))
        except CommLost as error:
            raise GroupLost(None, f"another replica is gone or late ({error.message})") from error
        if not decision.launch:
            return None
        if plan is None:
            plan = idle()
        agreed = decision.agreed
        if agreed.rebalance:
            plan = with_rebalance(plan)
        return msgspec.structs.replace(plan, agreed=agreed, halves=1 + agreed.halves)

    def connect(self, store: Any, epoch: int, timeout: float, bells: Sequence[str] = ()) -> None:
        """Begins ``epoch`` with all heads, asleep. See ``AgreementGroup.connect``. Raises CommLost."""
        self._group.connect(store, epoch, timeout, bells)

    def abort(self) -> None:
        """Ends the epoch's agreement: whoever waits in it loses its group."""
        self._group.abort()

    def close(self) -> None:
        """Leaves the domain."""
        self._group.close()


def vote_of(plan: StepPlan | None, unfinished: bool) -> Vote:
    """What a replica votes about its final plan; None: it has none."""
    if plan is None:
        return Vote(unfinished=unfinished)
    return Vote(
        unfinished=True,
        rows=plan.rows,
        tokens=plan.tokens,
        halves=plan.halves > 1,
        half=larger_half(plan) if plan.halves > 1 else 0,
        drafts=most_drafts(plan),
        rebalance=rebalances(plan),
    )
