"""The supervisor of a simulated cluster: owns the engine processes, and restarts dead ones within a budget.

A registry announces all processes to API servers. An API server that gives an instance up notifies the
supervisor, although other API servers may still use the same process. The supervisor then ends the process
for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from testing.cluster.directory import DirectoryView, check_incarnations, check_roles
from testing.cluster.engine_process import EngineProcess
from weft.common.errors import EngineDead, InvalidRequest
from weft.common.restarts import RestartBudget
from weft.config.topology import serves
from weft.control.processes import scaling
from weft.control.processes.table import Member

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.front import FrontProcess


Plan: TypeAlias = Callable[[Mapping[str, Member], frozenset[str], frozenset[str]], list[str]]
"""Returns the names that leave, for (members, leaving names, retired names). See ``scaling``."""


class Supervisor:
    """The supervisor of a simulated cluster, which never dies."""

    def __init__(self, cluster: Cluster, instances: dict[str, str], restarts: int) -> None:
        """Create the supervisor. ``restarts`` is the budget of all engines together."""
        self._cluster = cluster
        self._expert_groups = instances
        self._budget = RestartBudget(restarts, 600.0)
        self.engine_processes: dict[str, EngineProcess] = {}
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
        self.views: dict[str, DirectoryView] = {}
        """API server -> the directory as the API server has read it."""

    def start(self, instance: str) -> None:
        """Start a process and announce it, unless the instance was retired in the meantime."""
        cluster = self._cluster
        if instance in self.retired:
            return
        rng = self._cluster.rng
        engine_process = EngineProcess(cluster, instance, self._started)
        self._started += 1
        self.engine_processes[instance] = engine_process
        engine_process.start(
            *cluster.start_times(engine_process, rng.uniform(0.01, 0.1), rng.uniform(0.02, 0.3))
        )
        cluster.note("supervisor", "..", engine_process.name, "started")
        for front in cluster.fronts:
            self.tell(front, self._read, front, engine_process)

    def introduce(self, front: FrontProcess) -> None:
        """Announce all present processes to ``front``, which has just begun."""
        for engine_process in self.engine_processes.values():
            if engine_process.instance in self.removed:
                self.tell(front, front.left, engine_process.instance)
                continue
            self.tell(front, self._read, front, engine_process)
            if engine_process.instance in self.retired:
                self.tell(front, front.retired, engine_process.instance, EngineDead("it died too often"))
            elif engine_process.replaced:
                self.tell(front, front.ended, engine_process)

    def tell(self, front: FrontProcess, what: Callable[..., object], *arguments: object) -> None:
        """Send an entry of the registry to ``front``. Entries arrive in order, after a random delay."""
        cluster = self._cluster
        front.registry_at = max(front.registry_at, cluster.now + 0.001 + cluster.rng.random() * 0.03)
        cluster.at(front.registry_at, front, what, *arguments)

    def ended(self, engine_process: EngineProcess) -> None:
        """Notice the end of a process: announce it to the API servers and start a successor.

        Ignored if the process is not the present one.
        """
        if not self._present(engine_process):
            return
        if self._cluster.rng.random() < 0.7:  # else API servers see the consequences before the end
            for front in self._cluster.fronts:
                self.tell(front, front.ended, engine_process)
        self._again(engine_process, "its process ended")

    def replace(self, front: FrontProcess, engine_process: EngineProcess) -> None:
        """Handle a report of ``front``, which has given ``engine_process`` up."""
        if not self._present(engine_process):
            return  # a successor exists, and ``front`` knows or will know
        self._cluster.end_engine_process(engine_process)
        self._again(engine_process, "a front gave it up")

    def drain(self, instance: str) -> bool:
        """Begin a rolling upgrade: drain the process, then start another one. Return False if not possible
        now."""
        if not self._can_drain(instance):
            return False
        self._upgrading.add(instance)
        for front in self._cluster.fronts:
            self.tell(front, front.draining, instance)
        self._drain(instance)
        return True

    def remove(self, instance: str) -> bool:
        """Drain the process of an instance, which leaves the server: an operator's order. The instance may
        join again later. Return False if the order is refused, or not possible now.
        """
        return self._order(
            instance,
            lambda members, leaving, retired: scaling.plan_removal(
                instance, members, leaving, retired, serves
            ),
        )

    def remove_apart(self, instance: str) -> bool:
        """Cut a prefill instance off from all other engines, and remove the instance during its next
        transfer. The cache then never arrives. Without shared memory, the engines are on several hosts, and
        do not see each other's end from now on. Return False: counted at the removal. The victim is any
        prefill instance, not ``instance``."""
        cluster, rng = self._cluster, self._cluster.rng
        network, roles = cluster.transfers.network, cluster.transfers.roles
        engines = {name: one.engine for name, one in self.engine_processes.items()}
        if prefill := [n for n, role in roles.items() if role == "prefill" and not engines[n].transferring]:
            chosen = rng.choice(prefill)
            name, until = self.engine_processes[chosen].name, cluster.now + rng.uniform(4.0, 9.0)
            others = [one.name for one in self.engine_processes.values() if one.name != name]
            network.cut |= {frozenset((name, other)): until for other in others}
            network.sees_ends = network.sees_ends and cluster.transfers.wires.kind == "shm"
            cluster.pending_faults += 1
            self._remove_transferring(chosen, cluster.now + 1.0)
        return False

    def _remove_transferring(self, instance: str, until: float) -> None:
        """Remove an instance once the instance transfers a cache, or at ``until``."""
        cluster = self._cluster
        if cluster.now < until and not self.engine_processes[instance].engine.transferring:
            cluster.at(cluster.now + 0.05, None, self._remove_transferring, instance, until)
            return
        cluster.pending_faults -= 1
        if self.remove(instance):
            cluster.happened("left while apart")

    def scale_down(self, instance: str) -> bool:
        """Let an operator order one group less of the role of ``instance``. Return False as ``remove``."""
        roles = self._cluster.transfers.roles
        base = roles[instance]
        groups = len([name for name, role in roles.items() if role == base and name not in self.removed]) - 1
        return self._order(
            instance,
            lambda members, leaving, retired: (
                scaling.plan_scale(base, groups, members, leaving, retired, serves, first=members).leaving
            ),
        )

    def _order(self, instance: str, plan: Plan) -> bool:
        """Carry out an operator's order, with the product's plan of the names that leave. Raise Violation if
        the server loses a role by the order."""
        if self._expert_groups[instance]:
            return False
        transfers = self._cluster.transfers
        members = {
            name: Member("", name, role, role, tower=transfers.images.towers and role != "decode")
            for name, role in transfers.roles.items()
        }
        try:
            names = plan(members, frozenset(self.removed), frozenset(self.retired))
        except InvalidRequest:
            return False
        if not all(map(self._can_drain, names)):
            return False
        check_roles(self._cluster, names)
        for name in names:
            self.removed.add(name)
            for front in self._cluster.fronts:
                self.tell(front, front.left, name)
            self._drain(name)
        return True

    def twin(self, instance: str) -> bool:
        """Start another process of an instance whose process lives on, as an outer system does for a host
        that seems lost. Return False if not possible now.

        API servers read the records of both processes in any order, until the former process ends.
        """
        cluster, rng = self._cluster, self._cluster.rng
        if cluster.tensor > 1 or self._expert_groups[instance] or instance in self.removed:
            return False
        if not self._can_drain(instance):
            return False
        former = self.engine_processes[instance]
        former.replaced = True
        self.restarts += 1
        self.start(instance)
        both = former, self.engine_processes[instance]
        for one in both:
            one.slow = True
        end = cluster.now + rng.uniform(0.3, 2.0)
        for front in cluster.fronts:
            for _ in range(rng.choice((1, 2, 3))):
                read = rng.uniform(cluster.now, end - 0.2)
                cluster.at(read, None, self.tell, front, self._read, front, rng.choice(both))
        cluster.pending_faults += 1
        cluster.at(end, None, self._end_former, former)
        return True

    def _end_former(self, former: EngineProcess) -> None:
        """End a process that a second process of the name has replaced. Raise Violation if API servers use
        different processes of the name."""
        self._cluster.pending_faults -= 1
        check_incarnations(self._cluster, former.instance)
        self._cluster.end_engine_process(former)

    def _read(self, front: FrontProcess, engine_process: EngineProcess) -> None:
        """Let ``front`` read the record of a process. Connect if the process is the present one of a member,
        and not the one that ``front`` knows."""
        view = self.views.setdefault(front.name, DirectoryView())
        present = view.read(engine_process.instance, engine_process.number, self._cluster.now)
        instance = front.fleet.table.instances.get(engine_process.instance)
        known = front.links.get(-1 if instance is None else instance.link)
        if known is not None and known.engine_process is engine_process:
            return
        if present and engine_process.instance not in front.left_instances - front.lapsed:
            front.started(engine_process)

    def lapse(self, instance: str) -> bool:
        """Let the lease of an instance end at one API server, which forgets the instance, although the engine
        lives. The lease is renewed a moment later. Return False if not possible now.

        Another instance of the role stays.
        """
        cluster = self._cluster
        roles = cluster.transfers.roles
        fronts = [one for one in cluster.fronts if instance not in one.lapsed]
        left = {name for name in roles if name not in self.retired | self.removed | {instance}}
        alone = roles[instance] not in {roles[name] for name in left} or bool(self._expert_groups[instance])
        if alone or not fronts or not self._can_drain(instance):
            return False
        front = cluster.rng.choice(fronts)
        self.tell(front, front.lapse, instance)
        cluster.pending_faults += 1
        cluster.at(cluster.now + cluster.rng.uniform(0.05, 1.0), None, self._renew, front, instance)
        return True

    def _renew(self, front: FrontProcess, instance: str) -> None:
        """Renew a lease that ended: the API server finds the present process of the instance."""
        self._cluster.pending_faults -= 1
        if front in self._cluster.fronts:
            self.tell(front, front.renew, instance)

    def _can_drain(self, instance: str) -> bool:
        """Return True if the process of ``instance`` serves and does not drain yet."""
        engine_process = self.engine_processes[instance]
        serves = engine_process.alive and engine_process.ready
        return serves and instance not in self._upgrading and not engine_process.protocol.draining

    def _drain(self, instance: str) -> None:
        """Count a drain and let the process learn of the drain a moment later."""
        cluster, engine_process = self._cluster, self.engine_processes[instance]
        self.drains += 1
        cluster.at(cluster.now + cluster.rng.random() * 0.04, engine_process, engine_process.drain)

    def _rejoin(self, instance: str) -> None:
        """Let a removed instance join again, with a new process.

        Ignored once the server can serve nothing.
        """
        cluster = self._cluster
        cluster.pending_faults -= 1
        if not cluster.transfers.can_serve(self.retired | self.removed):
            return
        cluster.count("joined")
        self.removed.discard(instance)
        cluster.replicas[instance].reopen()
        for front in cluster.fronts:
            self.tell(front, front.joined, instance)
        self.start(instance)

    def drained(self, engine_process: EngineProcess) -> None:
        """End a drained process without work."""
        self._cluster.count("upgraded")
        engine_process.close_transfers()
        self._cluster.end_engine_process(engine_process, lingers=True, dismiss=True)

    def others(self, engine_process: EngineProcess) -> list[EngineProcess]:
        """Return the other live engines of the expert-parallel group."""
        expert_group = self._expert_groups[engine_process.instance]
        names = [
            name for name, other in self._expert_groups.items() if expert_group and other == expert_group
        ]
        return [
            self.engine_processes[n]
            for n in names
            if self.engine_processes[n] is not engine_process and self.engine_processes[n].alive
        ]

    def _present(self, engine_process: EngineProcess) -> bool:
        """Return True if nothing was done yet about the end of ``engine_process``."""
        return (
            engine_process.instance not in self.retired
            and engine_process is self.engine_processes[engine_process.instance]
            and not engine_process.replaced
        )

    def _again(self, engine_process: EngineProcess, why: str) -> None:
        """Plan the successor of a process, or retire the instance when the budget is used up."""
        cluster = self._cluster
        instance = engine_process.instance
        # From now on other reports about the same process change nothing.
        engine_process.replaced = True
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
        expert_group = self._expert_groups[instance]
        names = [
            n
            for n, other in self._expert_groups.items()
            if n == instance or (expert_group and other == expert_group)
        ]
        # With one member of an expert-parallel group all members are retired.
        for name in names:
            if name in self.retired:
                continue
            cluster.count("retired")
            cluster.note("supervisor", "..", name, "retired")
            self.retired.add(name)
            cluster.end_engine_process(self.engine_processes[name])
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
        if not cluster.transfers.can_serve(self.retired | self.removed):
            return  # the server has ended
        cluster.count("revived")
        self._budget = RestartBudget(self._budget.most, self._budget.window)
        for name in names:
            cluster.note("supervisor", "..", name, "revived")
            self.retired.discard(name)
            cluster.replicas[name].reopen()
            self.start(name)
