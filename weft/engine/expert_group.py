"""The part of one replica in its expert-parallel group: all replicas agree on each step before the launch.

An expert-parallel group is lost and formed as a whole. When a rank of any replica is lost, the communicators
of all replicas break. Each replica forms a group again, and the engine processes meet for the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weft.group.types import GroupLost
from weft.overlap.split import larger_micro_batch
from weft.parallel.agreement import AgreementGroup
from weft.parallel.group_comm import CommLost
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.votes import Vote, most_drafts
from weft.types.plan import AdapterUpdate, ReplicaUpdate

_UPDATES = msgspec.msgpack.Decoder(tuple[AdapterUpdate, ...])


class ExpertGroup:
    """The part of one replica in its expert-parallel group. Used from the thread that steps or forms the
    group; ``abort`` is safe from any thread.
    """

    def __init__(self, group: AgreementGroup) -> None:
        self._group = group

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
    ) -> PlanBuilder | None:
        """Return the builder of the step to launch now, or None if the replicas launch no step.

        ``builder``: the proposal of the local replica, or None. ``unfinished``: True if the local replica has
        live sequences or steps in flight. ``updates``: updates of adapters in the plan, which the ranks of
        all replicas apply. The result is ``builder``, or ``idle()`` without a proposal, with the fields
        ``agreed``, ``micro_batches``, ``rebalance`` and ``others`` set in place. Blocks until all replicas
        have voted.

        Raises GroupLost when a replica is gone or late, and EngineDead when the replicas are not at the same
        step.
        """
        try:
            sent = msgspec.msgpack.encode(tuple(updates)) if updates else b""
            decision = self._group.agree(vote_of(builder, unfinished), sent)
        except CommLost as error:
            raise GroupLost(None, f"another replica is gone or late ({error.message})") from error
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
        self._group.connect(store, epoch, timeout, wakeups)

    def abort(self) -> None:
        """End the agreement of the epoch. A blocked ``settle`` then raises GroupLost."""
        self._group.abort()

    def close(self) -> None:
        """Leave the expert-parallel group."""
        self._group.close()


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
