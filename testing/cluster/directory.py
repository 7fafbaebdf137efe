"""The directory of a simulated cluster, as API servers read the directory, and rules for its members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testing.cluster.check import require
from weft.control.directory.leases import Leases
from weft.control.directory.record import EngineRecord
from weft.control.fleet.instances import InstanceState

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster


class DirectoryView:
    """The records that one API server has read, and the product's leases over the records."""

    def __init__(self) -> None:
        self._leases = Leases()
        self._records: dict[str, EngineRecord] = {}
        self._beat = 0

    def read(self, name: str, incarnation: int, now: float) -> bool:
        """Read a renewed record. Return True if the record's process is now the present one of ``name``."""
        self._beat += 1
        self._records[name] = EngineRecord(
            name=name, incarnation=incarnation, endpoint="", model="", beat=self._beat
        )
        return self._leases.present(self._records, now)[name].incarnation == incarnation


def check_incarnations(cluster: Cluster, name: str) -> None:
    """Raise Violation if API servers that have read all records use different processes of ``name``."""
    used = {}
    for front in cluster.fronts:
        instance = front.fleet.table.instances.get(name)
        late = front.stalled_until > cluster.now or front.registry_at >= cluster.now
        if front.alive and not front.closing and not late and instance is not None and instance.link >= 0:
            used[front.name] = front.links[instance.link].engine_process.name
    require(len(set(used.values())) < 2, f"API servers use different processes of one engine: {used}")


def check_roles(cluster: Cluster, names: list[str]) -> None:
    """Raise Violation if the server loses the last group of a role with ``names``, and no other groups do the
    work of the role. The fallback of a decode group that computes prompts does not count."""
    roles, supervisor = cluster.transfers.roles, cluster.supervisor
    present = [name for name in roles if name not in supervisor.retired | supervisor.removed]
    left = {roles[name] for name in present if name not in names}
    lost = {roles[name] for name in present} - left
    images = cluster.transfers.images
    whole = "unified" in left or {"prefill", "decode"} <= left
    sees = not images.there or images.towers or "encode" in left
    gone = f"{names} leave the server, and no group does the work of {sorted(lost)}"
    require(not lost or (whole and sees), gone)


def check_end(cluster: Cluster) -> None:
    """Raise Violation if a process runs whose instance has left, if an API server uses a process that is not
    the present one of its name, or if an API server waits for a process that serves."""
    supervisor = cluster.supervisor
    for name, process in supervisor.engine_processes.items():
        leaves = process.alive and name in supervisor.removed
        require(not leaves, f"{process.name} runs, and its instance has left")
        for front in cluster.fronts:
            if not front.alive or front.closing:
                continue
            instance = front.fleet.table.instances.get(name)
            if instance is not None and instance.alive:
                used = front.links[instance.link].engine_process
                require(used is process, f"{front.name} uses {used.name}, and {process.name} has replaced it")
            elif process.alive and process.ready and name not in front.lapsed:
                lost = instance is None or instance.state is InstanceState.DOWN
                require(not lost, f"{front.name} has lost {name}, and {process.name} serves")
