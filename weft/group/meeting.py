"""Agreement of the engine processes of an expert-parallel group on the next epoch. Pure.

Any engine process may die and start again. Each engine process has a lease, readable by all. The lease names
the epoch to begin, and states whether the epoch has begun. A process proposes an epoch begun by no process
and not below another proposal. When all proposals are equal, the epoch begins. The name of the rendezvous
store is a digest of all incarnations. So a process with an outdated lease of a dead process waits at another
store, meets nobody, times out and proposes the next epoch.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence

from weft.group.types import Connect, Lease


def propose(own: int, others: Sequence[Lease | None]) -> int:
    """Return the epoch to propose: ``own``, or a later epoch if other leases require one."""
    return max([own, *(lease.epoch + lease.begun for lease in others if lease is not None)])


def complete(epoch: int, others: Sequence[Lease | None]) -> bool:
    """Return True if every other lease proposes ``epoch`` and has not begun."""
    return all(lease is not None and lease.epoch == epoch and not lease.begun for lease in others)


class Meeting:
    """Part of one engine process in the meeting."""

    def __init__(self, replica: int, stores: str = "", wakeup: str = "", incarnation: str = "") -> None:
        """Create the part of ``replica``. ``wakeup`` is the wake-up address of this engine process.

        ``stores`` is the prefix of store addresses (see ``Lease``); only replica 0 needs one. An empty
        ``incarnation`` becomes a random incarnation.
        """
        self.replica = replica
        self._stores, self._wakeup = stores, wakeup
        self._incarnation = incarnation or secrets.token_hex(8)
        self._incarnations: list[str] = []
        self._epoch = 0
        self._proposed = False
        self.looked = -math.inf
        """Time of the last reading of leases, in seconds."""

    def want(self, epoch: int) -> None:
        """Ask for ``epoch`` or a later epoch. The next ``look`` returns a lease."""
        self._epoch, self._proposed = epoch, False

    def look(self, leases: Sequence[Lease | None]) -> Lease | Connect | None:
        """Return the lease to write, ``Connect`` if all proposals agree, or None while proposals differ.

        Stores the proposed epoch.

        ``leases``: one entry per replica; None for a replica without a lease so far.
        """
        others = [lease for number, lease in enumerate(leases) if number != self.replica]
        epoch = propose(self._epoch, others)
        # A proposal must be visible to all before the process counts the others' proposals.
        if epoch != self._epoch or not self._proposed:
            self._epoch, self._proposed = epoch, True
            return self._lease(epoch, begun=False)
        return self._meet(leases) if complete(epoch, others) else None

    def begun(self, epoch: int) -> Lease:
        """Return the lease to write after all engine processes have begun ``epoch``."""
        return self._lease(epoch, begun=True)

    def moved_on(self, epoch: int, leases: Sequence[Lease | None]) -> bool:
        """Return True if another engine process has left ``epoch``: a later epoch or a new incarnation."""
        return any(
            lease is not None and (lease.epoch > epoch or lease.incarnation != incarnation)
            for lease, incarnation in zip(leases, self._incarnations, strict=True)
        )

    def _meet(self, leases: Sequence[Lease | None]) -> Connect:
        """Return the ``Connect`` action, and store the incarnations that meet.

        ``leases``: all leases; the entry of this process is replaced.
        """
        mine = self._lease(self._epoch, begun=False)
        present = [mine if n == self.replica else lease for n, lease in enumerate(leases)]
        known = [lease for lease in present if lease is not None]
        self._incarnations = [lease.incarnation for lease in known]
        # Processes with different views of the incarnations get different stores, and cannot meet by mistake.
        named = hashlib.blake2b("/".join(self._incarnations).encode(), digest_size=6).hexdigest()
        store = f"{known[0].stores}/epoch{self._epoch}-{named}"
        return Connect(self._epoch, store, tuple(lease.wakeup for lease in known))

    def _lease(self, epoch: int, begun: bool) -> Lease:
        return Lease(self._incarnation, epoch, begun, self._wakeup, self._stores)
