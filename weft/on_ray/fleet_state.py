"""What the fleet actor keeps: wanted groups, records of engines, and orders to drain. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.control.directory.record import EngineRecord


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A group that Ray should run."""

    group: str
    base: str
    role: str
    engines: tuple[str, ...]
    """Names of the engines of the group."""
    expert_group: str = ""
    gpus: int = 0
    cpus: float = 1.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the fleet for a reader."""

    plans: tuple[GroupPlan, ...]
    records: tuple[EngineRecord, ...]
    retired: tuple[str, ...] = ()
    """Groups that Ray does not restart any more."""


class FleetState:
    """The wanted groups and the published engines of one server."""

    def __init__(self) -> None:
        self.plans: dict[str, GroupPlan] = {}
        """Group -> plan, in the order of the start."""
        self._records: dict[str, EngineRecord] = {}
        self._drains: set[tuple[str, int]] = set()
        """(engine, incarnation) with the order to drain."""

    def want(self, plans: Iterable[GroupPlan]) -> None:
        """Add groups. A known group keeps its place."""
        self.plans.update({plan.group: plan for plan in plans})

    def unwant(self, group: str) -> None:
        """Drop a group. Its records stay until the engines withdraw them, or the leases end."""
        self.plans.pop(group, None)

    def publish(self, records: Iterable[EngineRecord]) -> set[str]:
        """Store records of one group. Return the engines among them that have the order to drain."""
        found = set()
        for record in records:
            self._records[record.name] = record
            if (record.name, record.incarnation) in self._drains:
                found.add(record.name)
        return found

    def withdraw(self, name: str, incarnation: int) -> None:
        """Remove a record, unless another incarnation has replaced the record."""
        record = self._records.get(name)
        if record is not None and record.incarnation == incarnation:
            del self._records[name]
        self._drains.discard((name, incarnation))

    def drain(self, name: str, incarnation: int) -> None:
        """Leave the order to drain for one process."""
        self._drains.add((name, incarnation))

    def snapshot(self, retired: Iterable[str] = ()) -> Snapshot:
        """Return everything that a reader needs."""
        return Snapshot(
            plans=tuple(self.plans.values()), records=tuple(self._records.values()), retired=tuple(retired)
        )
