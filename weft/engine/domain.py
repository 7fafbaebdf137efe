"""One replica's part in its domain: every plan is agreed with the other replicas before it is launched.

A domain is lost as a whole, and formed as a whole: when a rank of any replica is gone, communicators break in
all of them, each forms its group anew, and their heads meet for the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.group.types import GroupLost
from weft.overlap.split import larger_micro_batch
from weft.parallel.agreement import AgreementGroup
from weft.parallel.group_comm import CommLost
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.votes import Vote, most_drafts


class Domain:
    """One replica's part in its domain. Used from the thread that steps or forms the group; ``abort`` from
    any thread.
    """

    def __init__(self, group: AgreementGroup) -> None:
        self._group = group

    @property
    def awake(self) -> bool:
        """Whether the domain steps. If so, this replica must step, too, also without work of its own."""
        return self._group.awake

    @property
    def sockets(self) -> Sequence[Any]:
        """To poll while asleep."""
        return self._group.sockets

    def settle(
        self, builder: PlanBuilder | None, unfinished: bool, idle: Callable[[], PlanBuilder]
    ) -> PlanBuilder | None:
        """The step to launch now: ``builder`` as agreed, or ``idle()``; None where no replica has one.

        ``builder`` says what this replica would like. ``unfinished``: whether sequences live or
        steps are in flight here. Raises GroupLost when a replica is gone or late, and EngineDead when
        replicas are not at the same step.
        """
        try:
            decision = self._group.agree(vote_of(builder, unfinished))
        except CommLost as error:
            raise GroupLost(None, f"another replica is gone or late ({error.message})") from error
        if not decision.launch:
            return None
        builder = builder or idle()
        agreed = decision.agreed
        builder.agreed = agreed
        builder.micro_batches = 1 + agreed.overlap
        builder.rebalance = agreed.rebalance
        return builder

    def connect(self, store: Any, epoch: int, timeout: float, wakeups: Sequence[str] = ()) -> None:
        """Begins ``epoch`` with all heads, asleep. See ``AgreementGroup.connect``. Raises CommLost."""
        self._group.connect(store, epoch, timeout, wakeups)

    def abort(self) -> None:
        """Ends the epoch's agreement: a call of ``settle`` that waits raises GroupLost."""
        self._group.abort()

    def close(self) -> None:
        """Leaves the domain."""
        self._group.close()


def vote_of(builder: PlanBuilder | None, unfinished: bool) -> Vote:
    """What a replica votes about the step that it would launch; None: it has none."""
    if builder is None:
        return Vote(unfinished=unfinished)
    return Vote(
        unfinished=True,
        launch=True,
        rows=builder.rows,
        tokens=builder.tokens,
        overlap=builder.micro_batches > 1,
        micro_batch_tokens=larger_micro_batch(builder) if builder.micro_batches > 1 else 0,
        drafts=most_drafts(builder),
        rebalance=builder.rebalance,
    )
