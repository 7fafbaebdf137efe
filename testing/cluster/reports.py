"""Reports of ranks about steps, and invariants of an epoch, independent of ``Membership``."""

from __future__ import annotations

from dataclasses import astuple

from testing.cluster.check import Violation, require
from testing.cluster.ranks import Replica
from weft.group.membership import Membership
from weft.types import frames as f


class Reports:
    """Reports of the ranks of one group, as read by the engine."""

    def __init__(self, name: str, members: Membership, replica: Replica) -> None:
        """Create an empty record. ``name`` is the engine's name."""
        self._name = name
        self._members = members
        self._replica = replica
        self._others = len(replica.ranks) - 1
        self._reported: dict[int, set[int]] = {}
        """Step of the present epoch -> ranks with a received report."""

    def begin(self, step: int) -> None:
        """Record the begin of a step at the engine's own rank."""
        self._reported.setdefault(step, set())

    def clear(self) -> None:
        """Forget all reports, because another epoch begins."""
        self._reported.clear()

    def take(self, rank: int, peer: bytes, outcome: f.StepOutcome) -> None:
        """Record a report. Reports of a foreign process or another epoch are ignored."""
        member = self._members.members[rank]
        if member.peer == peer and outcome.epoch == self._members.epoch:
            self._reported.setdefault(outcome.step, set()).add(rank)

    def check_count(self, step: int, epoch: int) -> None:
        """Raise Violation unless ``step`` may count.

        The step must belong to the running epoch. Every rank must have reported all steps up to ``step``
        minus ``lag``.
        """
        members = self._members
        name = f"{self._name}: step {step}"
        require(epoch == members.epoch, f"{name} of epoch {epoch} is counted in epoch {members.epoch}")
        last = step - members.lag
        for number in [number for number in self._reported if number <= last]:
            reported = self._reported.pop(number)
            if len(reported) < self._others:
                lacks = f"of step {number} only ranks {sorted(reported)} have reported"
                raise Violation(f"{name} is counted before all ranks reported: {lacks}")

    def check_epoch(self) -> None:
        """Raise Violation unless every rank is in the beginning epoch."""
        members = self._members
        name = f"{self._name}: epoch {members.epoch}"
        require(members.epoch > members.aborted, f"{name} runs, and was ended")
        for rank, member in members.members.items():
            process = self._replica.by_peer.get(member.peer or b"")
            require(process is not None, f"{name} runs, and rank {rank} has not said hello")
            assert process is not None
            require(process.rank == rank, f"{name}: rank {rank} is the process of rank {process.rank}")
            require(process.given_up_by is not self._replica.group, f"{name}: rank {rank} was given up")
            require(process.epoch == members.epoch, f"{name}: rank {rank} is in epoch {process.epoch}")

    def known_of(self, rank: int) -> tuple[object, ...]:
        """Return the membership's knowledge of ``rank``, for comparison."""
        members = self._members
        return (members.phase, members.pools, members.steps.own, *astuple(members.members[rank]))
