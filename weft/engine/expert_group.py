"""The part of one replica in its expert-parallel group: all replicas agree on each step before the launch.

An expert-parallel group is lost and formed as a whole. When a rank of any replica is lost, the communicators
of all replicas break. Each replica forms a group again, and the engine processes meet for the next epoch.

Replicas compute with experts of each other. So a replica makes a plan only after a vote of the epoch has
shown that all replicas have the replica's version of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.group.types import GroupLost
from weft.overlap.split import larger_micro_batch
from weft.parallel.agreement import AgreementGroup
from weft.parallel.group_comm import CommLost
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.votes import Vote, most_drafts
from weft.types.plan import AdapterUpdate, ReplicaUpdate

log = get_logger(__name__)

HELD_S = 0.01
"""Seconds between two votes while the replicas have weights of different versions."""
_UPDATES = msgspec.msgpack.Decoder(tuple[AdapterUpdate, ...])


class ExpertGroup:
    """The part of one replica in its expert-parallel group. Used from the thread that steps or forms the
    group; ``abort`` is safe from any thread.
    """

    def __init__(self, group: AgreementGroup) -> None:
        self._group = group
        self._weights: int | None = None
        """Version of the weights of all replicas in the last vote; None before the first vote of an epoch,
        and while the versions differ."""
        self._told = False
        """True once the log names the present difference of versions."""

    def held(self, weights: int) -> bool:
        """Return True if this replica, with version ``weights`` of the weights, may not plan a step. Then
        ``compare`` comes first."""
        return self._weights != weights

    def compare(self, unfinished: bool, weights: int) -> None:
        """Vote without a step, so that ``held`` knows the versions of all replicas. For ``unfinished`` and
        the errors see ``settle``. Waits ``HELD_S`` if the versions differ."""
        self.settle(None, unfinished, _no_step, weights=weights)
        if self._weights is None:
            time.sleep(HELD_S)

    @property
    def awake(self) -> bool:
        """True while the expert-parallel group runs steps. The local replica must then step, too, even
        without work.
        """
        return self._group.awake

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets to poll while the expert-parallel group is asleep."""
        return self._group.sockets

    def settle(
        self,
        builder: PlanBuilder | None,
        unfinished: bool,
        idle: Callable[[], PlanBuilder],
        updates: Sequence[AdapterUpdate] = (),
        weights: int = 0,
    ) -> PlanBuilder | None:
        """Return the builder of the step to launch now, or None if the replicas launch no step.

        ``builder``: the proposal of the local replica, or None. ``unfinished``: True if the local replica has
        live sequences or steps in flight. ``updates``: updates of adapters in the plan, which the ranks of
        all replicas apply. ``weights``: version of the local weights. The result is
        ``builder``, or ``idle()`` without a proposal, with the fields ``agreed``, ``micro_batches``,
        ``rebalance`` and ``others`` set in place. Blocks until all replicas have voted.

        Raises GroupLost when a replica is gone or late, or when a replica has planned a step and the weights
        of another replica have changed since the last vote. Raises EngineDead when the replicas are not at
        the same step.
        """
        vote = msgspec.structs.replace(vote_of(builder, unfinished), weights=weights)
        try:
            sent = msgspec.msgpack.encode(tuple(updates)) if updates else b""
            decision = self._group.agree(vote, sent)
        except CommLost as error:
            raise GroupLost(None, f"another replica is gone or late ({error.message})") from error
        if decision.held and not self._told:
            log.warning("replicas have weights of different versions: no step runs until the versions agree")
        self._weights, self._told = None if decision.held else weights, decision.held
        if decision.broken:
            raise GroupLost(None, "replicas have weights of different versions, and one has planned a step")
        if not decision.launch:
            return None
        builder = builder or idle()
        agreed = decision.agreed
        builder.agreed = agreed
        builder.micro_batches = 1 + agreed.overlap
        builder.rebalance = agreed.rebalance
        builder.others = [
            ReplicaUpdate(replica=replica, update=update)
            for replica, encoded in decision.others.items()
            for update in _UPDATES.decode(encoded)
        ]
        return builder

    def connect(self, store: Any, epoch: int, timeout: float, wakeups: Sequence[str] = ()) -> None:
        """Begin ``epoch`` with the engine processes of all replicas, asleep. See ``AgreementGroup.connect``.
        Raises CommLost.
        """
        self._weights = None
        self._group.connect(store, epoch, timeout, wakeups)

    def abort(self) -> None:
        """End the agreement of the epoch. A blocked ``settle`` then raises GroupLost."""
        self._group.abort()

    def close(self) -> None:
        """Leave the expert-parallel group."""
        self._group.close()


def _no_step() -> PlanBuilder:
    raise EngineDead("a replica was to run a step of weights that the replica does not have")


def vote_of(builder: PlanBuilder | None, unfinished: bool) -> Vote:
    """Return the vote of a replica on the step in ``builder``; None means no proposal."""
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
        adapted=builder.adapted,
    )
