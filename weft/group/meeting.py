"""How heads, of which any may die and be started anew, agree that all of them are there. Pure.

Every head has a lease that all can see: it says which epoch the head would begin, and whether it has begun. A
head proposes an epoch that nobody has begun, and none below what another proposes; when all propose the same,
it begins. The store that they meet at is named after the incarnations of all of them. So a head that took an
old lease for a living one meets nobody there, gives up in time, and proposes the next.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence

from weft.group.types import Connect, Lease


def propose(own: int, others: Sequence[Lease | None]) -> int:
    """The epoch to propose: ``own`` or a later one."""
    return max([own, *(lease.epoch + lease.begun for lease in others if lease is not None)])


def complete(epoch: int, others: Sequence[Lease | None]) -> bool:
    """Whether all others propose ``epoch``, too."""
    return all(lease is not None and lease.epoch == epoch and not lease.begun for lease in others)


class Meeting:
    """One head's part in the meeting of a domain's heads."""

    def __init__(self, replica: int, stores: str = "", wakeup: str = "", incarnation: str = "") -> None:
        """``stores``: see ``Lease``; of replica 0 alone. ``wakeup``: the address where this head is woken."""
        self.replica = replica
        self._stores, self._wakeup = stores, wakeup
        self._incarnation = incarnation or secrets.token_hex(8)
        self._incarnations: list[str] = []
        self._epoch = 0
        self._proposed = False
        self.looked = -math.inf
        """When leases were read."""

    def want(self, epoch: int) -> None:
        """This head would begin ``epoch``, or a later one."""
        self._epoch, self._proposed = epoch, False

    def look(self, leases: Sequence[Lease | None]) -> Lease | Connect | None:
        """The lease to write now, or what all agreed on; None: nothing yet."""
        others = [lease for number, lease in enumerate(leases) if number != self.replica]
        epoch = propose(self._epoch, others)
        if epoch != self._epoch or not self._proposed:
            self._epoch, self._proposed = epoch, True
            return self._lease(epoch, begun=False)
        return self._meet(leases) if complete(epoch, others) else None

    def begun(self, epoch: int) -> Lease:
        """The lease to write when all heads have begun ``epoch``."""
        return self._lease(epoch, begun=True)

    def moved_on(self, epoch: int, leases: Sequence[Lease | None]) -> bool:
        """Whether another head is no longer, or not yet again, in ``epoch``, which this one has begun."""
        return any(
            lease is not None and (lease.epoch > epoch or lease.incarnation != incarnation)
            for lease, incarnation in zip(leases, self._incarnations, strict=True)
        )

    def _meet(self, leases: Sequence[Lease | None]) -> Connect:
        """``leases``: of all, this head's own as anybody wrote it."""
        mine = self._lease(self._epoch, begun=False)
        present = [mine if n == self.replica else lease for n, lease in enumerate(leases)]
        known = [lease for lease in present if lease is not None]
        self._incarnations = [lease.incarnation for lease in known]
        named = hashlib.blake2b("/".join(self._incarnations).encode(), digest_size=6).hexdigest()
        store = f"{known[0].stores}/epoch{self._epoch}-{named}"
        return Connect(self._epoch, store, tuple(lease.wakeup for lease in known))

    def _lease(self, epoch: int, begun: bool) -> Lease:
        return Lease(self._incarnation, epoch, begun, self._wakeup, self._stores)
