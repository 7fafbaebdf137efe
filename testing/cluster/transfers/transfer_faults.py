"""Faults between groups of different roles. See ``testing.cluster.faults``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster


def cancel_transfer(cluster: Cluster) -> bool:
    """Let an engine return a sequence with an unfinished transfer. Return True if one was returned."""
    engine_processes = [
        engine_process
        for engine_process in cluster.supervisor.engine_processes.values()
        if engine_process.alive and engine_process.ready
    ]
    cluster.rng.shuffle(engine_processes)
    able = [
        engine_process
        for engine_process in engine_processes
        if engine_process.stalled_until <= cluster.now and not engine_process.engine.recovering
    ]
    return any(engine_process.evict(moving=True) is not None for engine_process in able)


def flip(cluster: Cluster) -> bool:
    """Flip bits of transferred data. Return False: counted when a digest is found to be wrong."""
    cluster.transfers.wires.flips += cluster.rng.choice((1, 1, 2, 5))
    return False


def cut_transfers(cluster: Cluster) -> bool:
    """Cut two engines off from each other for a while. Counted when a message is lost."""
    engine_processes = [
        engine_process
        for engine_process in cluster.supervisor.engine_processes.values()
        if engine_process.alive and engine_process.engine.all_transfers
    ]
    if len(engine_processes) > 1:
        pair = frozenset(engine_process.name for engine_process in cluster.rng.sample(engine_processes, 2))
        seconds = cluster.rng.choice((0.1, 0.5, 1.5, 5.0)) * (0.5 + cluster.rng.random())
        cluster.transfers.network.cut[pair] = cluster.now + seconds
        cluster.note("fault", "..", "", f"{sorted(pair)} are apart for {seconds:.3f} s")
    return False


def lose_messages(cluster: Cluster) -> bool:
    """Lose messages between engines from now on. Return False: counted when one is lost."""
    cluster.transfers.network.loss = cluster.rng.uniform(0.1, 0.4)
    return False


def repeat_messages(cluster: Cluster) -> bool:
    """Repeat messages between engines from now on. Return False: counted when one is repeated."""
    cluster.transfers.network.repeat = cluster.rng.uniform(0.2, 0.6)
    return False


def slow_bytes(cluster: Cluster) -> bool:
    """Slow all transfers from now on. Return True if an engine has transfers."""
    cluster.transfers.wires.delay = cluster.rng.uniform(0.1, 0.5)
    return any(
        engine_process.engine.transferring for engine_process in cluster.supervisor.engine_processes.values()
    )


KINDS: dict[str, tuple[int, Callable[[Cluster], bool]]] = {
    "room cancelled": (10, cancel_transfer),
    "bytes changed": (8, flip),
    "bytes slow": (6, slow_bytes),
    "room messages cut": (8, cut_transfers),
    "room messages lost": (6, lose_messages),
    "room messages repeated": (4, repeat_messages),
}
"""Faults in the form of ``faults.KINDS``."""
