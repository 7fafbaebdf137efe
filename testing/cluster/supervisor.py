"""The supervisor of a simulated cluster: owns the engine processes, and restarts dead ones within a budget.

A registry announces all processes to API servers. An API server that gives an instance up notifies the
supervisor, although other API servers may still use the same process. The supervisor then ends the process
for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from testing.cluster.head import HeadProcess
from weft.common.errors import EngineDead
from weft.common.restarts import RestartBudget

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.front import FrontProcess


class Supervisor:
    """The supervisor of a simulated cluster, which never dies."""

    def __init__(self, cluster: Cluster, instances: dict[str, str], restarts: int) -> None:
        """Create the supervisor. ``restarts`` is the budget of all engines together."""
        self._cluster = cluster
        self._domains = instances
        self._budget = RestartBudget(restarts, 600.0)
        self.heads: dict[str, HeadProcess] = {}
        """The present process of each instance, alive or not."""
        self.retired: set[str] = set()
        """Instances without any further process."""
        self.removed: set[str] = set()
        """Instances that leave or have left the server."""
        self.restarts = 0
        self.drains = 0
        """Number of instances ordered to drain."""
        self._started = 0
        self._upgrading: set[str] = set()

    def start(self, instance: str) -> None:
        """Start a process and announce it, unless the instance was retired in the meantime."""
        cluster = self._cluster
        if instance in self.retired:
            return
        rng = self._cluster.rng
        head = HeadProcess(cluster, instance, self._started)
        self._started += 1
        self.heads[instance] = head
        head.start(*cluster.start_times(head, rng.uniform(0.01, 0.1), rng.uniform(0.02, 0.3)))
        cluster.note("supervisor", "..", head.name, "started")
        for front in cluster.fronts:
            self.tell(front, front.started, head)

    def introduce(self, front: FrontProcess) -> None:
        """Announce all present processes to ``front``, which has just begun."""
        for head in self.heads.values():
            if head.instance in self.removed:
                self.tell(front, front.left, head.instance)
                continue
            self.tell(front, front.started, head)
            if head.instance in self.retired:
                self.tell(front, front.retired, head.instance, EngineDead("it died too often"))
            elif head.replaced:
                self.tell(front, front.ended, head)

    def tell(self, front: FrontProcess, what: Callable[..., object], *arguments: object) -> None:
        """Send an entry of the registry to ``front``. Entries arrive in order, after a random delay."""
        cluster = self._cluster
        front.registry_at = max(front.registry_at, cluster.now + 0.001 + cluster.rng.random() * 0.03)
        cluster.at(front.registry_at, front, what, *arguments)

    def ended(self, head: HeadProcess) -> None:
        """Notice the end of a process: announce it to the API servers and start a successor.

        Ignored if the process is not the present one.
        """
        if not self._present(head):
            return
        if self._cluster.rng.random() < 0.7:  # else API servers see the consequences before the end
            for front in self._cluster.fronts:
                self.tell(front, front.ended, head)
        self._again(head, "its process ended")

    def replace(self, front: FrontProcess, head: HeadProcess) -> None:
        """Handle a report of ``front``, which has given ``head`` up."""
        if not self._present(head):
            return  # a successor exists, and ``front`` knows or will know
        self._cluster.end_head(head)
        self._again(head, "a front gave it up")

    def drain(self, instance: str) -> bool:
        """Begin a rolling upgrade: drain the process, then start another one. Return False if not possible
        now."""
        head = self.heads[instance]
        if not (head.alive and head.ready) or instance in self._upgrading or head.protocol.draining:
            return False
        self.drains += 1
        self._upgrading.add(instance)
        for front in self._cluster.fronts:
            self.tell(front, front.draining, instance)
        self._cluster.at(self._cluster.now + self._cluster.rng.random() * 0.04, head, head.drain)
        return True

    def remove(self, instance: str) -> bool:
        """Drain the process of an instance, which leaves the server. Return False if not possible now.

        Another instance of the role stays. The instance may join again later.
        """
        cluster = self._cluster
        head, roles = self.heads[instance], cluster.rooms.roles
        left = {name for name in roles if name not in self.retired | self.removed | {instance}}
        if roles[instance] not in {roles[name] for name in left} or self._domains[instance]:
            return False
        if not (head.alive and head.ready) or instance in self._upgrading or head.protocol.draining:
            return False
        self.drains += 1
        self.removed.add(instance)
        for front in cluster.fronts:
            self.tell(front, front.left, instance)
        cluster.at(cluster.now + cluster.rng.random() * 0.04, head, head.drain)
        return True

    def _rejoin(self, instance: str) -> None:
        """Let a removed instance join again, with a new process.

        Ignored once the server can serve nothing.
        """
        cluster = self._cluster
        cluster.pending_faults -= 1
        if not cluster.rooms.can_serve(self.retired | self.removed):
            return
        cluster.count("joined")
        self.removed.discard(instance)
        cluster.replicas[instance].reopen()
        for front in cluster.fronts:
            self.tell(front, front.joined, instance)
        self.start(instance)

    def drained(self, head: HeadProcess) -> None:
        """End a drained process without work."""
        self._cluster.count("upgraded")
        head.close_rooms()
        self._cluster.end_head(head, lingers=True, dismiss=True)

    def others(self, head: HeadProcess) -> list[HeadProcess]:
        """Return the other live engines of the expert-parallel group."""
        domain = self._domains[head.instance]
        names = [name for name, other in self._domains.items() if domain and other == domain]
        return [self.heads[n] for n in names if self.heads[n] is not head and self.heads[n].alive]

    def _present(self, head: HeadProcess) -> bool:
        """Return True if nothing was done yet about the end of ``head``."""
        return head.instance not in self.retired and head is self.heads[head.instance] and not head.replaced

    def _again(self, head: HeadProcess, why: str) -> None:
        """Plan the successor of a process, or retire the instance when the budget is used up."""
        cluster = self._cluster
        instance = head.instance
        # From now on other reports about the same process change nothing.
        head.replaced = True
        if instance in self.removed:
            cluster.count("left")
            cluster.note("supervisor", "..", instance, "has left")
            cluster.replicas[instance].close()
            if cluster.rng.random() < 0.6:
                cluster.pending_faults += 1
                cluster.at(cluster.now + cluster.rng.uniform(0.1, 2.0), None, self._rejoin, instance)
            return
        upgrade = instance in self._upgrading
        self._upgrading.discard(instance)
        # Upgrades do not use up the restart budget.
        if not upgrade and not self._budget.grant(cluster.now):
            self._retire(instance, why)
            return
        self.restarts += 1
        cluster.at(cluster.now + cluster.rng.random() * 0.05, None, self.start, instance)

    def _retire(self, instance: str, why: str) -> None:
        """Retire an instance, with the whole expert-parallel group. An operator may revive the group
        later."""
        cluster = self._cluster
        domain = self._domains[instance]
        names = [n for n, other in self._domains.items() if n == instance or (domain and other == domain)]
        # With one member of an expert-parallel group all members are retired.
        for name in names:
            if name in self.retired:
                continue
            cluster.count("retired")
            cluster.note("supervisor", "..", name, "retired")
            self.retired.add(name)
            cluster.end_head(self.heads[name])
            cluster.replicas[name].close()
            for front in cluster.fronts:
                self.tell(front, front.retired, name, EngineDead(f"{why}, and was too often"))
        if cluster.rng.random() < 0.5:
            cluster.pending_faults += 1
            cluster.at(cluster.now + cluster.rng.uniform(0.3, 3.0), None, self._revive, names)

    def _revive(self, names: list[str]) -> None:
        """Let an operator restart a retired group, with a new budget.

        Ignored once the server can serve nothing.
        """
        cluster = self._cluster
        cluster.pending_faults -= 1
        if not cluster.rooms.can_serve(self.retired | self.removed):
            return  # the server has ended
        cluster.count("revived")
        self._budget = RestartBudget(self._budget.most, self._budget.window)
        for name in names:
            cluster.note("supervisor", "..", name, "revived")
            self.retired.discard(name)
            cluster.replicas[name].reopen()
            self.start(name)
