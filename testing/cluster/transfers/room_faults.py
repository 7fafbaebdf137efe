"""Faults between groups of different roles. See ``testing.cluster.faults``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster


def cancel_room(cluster: Cluster) -> bool:
    """Let an engine return a sequence with an unfinished transfer. Return True if one was returned."""
    heads = [head for head in cluster.supervisor.heads.values() if head.alive and head.ready]
    cluster.rng.shuffle(heads)
    able = [head for head in heads if head.stalled_until <= cluster.now and not head.engine.recovering]
    return any(head.evict(moving=True) is not None for head in able)


def flip(cluster: Cluster) -> bool:
    """Flip bits of transferred data. Return False: counted when a digest is found to be wrong."""
    cluster.rooms.wires.flips += cluster.rng.choice((1, 1, 2, 5))
    return False


def cut_rooms(cluster: Cluster) -> bool:
    """Cut two engines off from each other for a while. Return False: counted when a message is lost."""
    heads = [head for head in cluster.supervisor.heads.values() if head.alive and head.engine.rooms]
    if len(heads) > 1:
        pair = frozenset(head.name for head in cluster.rng.sample(heads, 2))
        seconds = cluster.rng.choice((0.1, 0.5, 1.5, 5.0)) * (0.5 + cluster.rng.random())
        cluster.rooms.network.cut[pair] = cluster.now + seconds
        cluster.note("fault", "..", "", f"{sorted(pair)} are apart for {seconds:.3f} s")
    return False


def lose_messages(cluster: Cluster) -> bool:
    """Lose messages between engines from now on. Return False: counted when one is lost."""
    cluster.rooms.network.loss = cluster.rng.uniform(0.1, 0.4)
    return False


def repeat_messages(cluster: Cluster) -> bool:
    """Repeat messages between engines from now on. Return False: counted when one is repeated."""
    cluster.rooms.network.repeat = cluster.rng.uniform(0.2, 0.6)
    return False


def slow_bytes(cluster: Cluster) -> bool:
    """Slow all transfers from now on. Return True if an engine has transfers."""
    cluster.rooms.wires.delay = cluster.rng.uniform(0.1, 0.5)
    return any(head.engine.transferring for head in cluster.supervisor.heads.values())


KINDS: dict[str, tuple[int, Callable[[Cluster], bool]]] = {
    "room cancelled": (10, cancel_room),
    "bytes changed": (8, flip),
    "bytes slow": (6, slow_bytes),
    "room messages cut": (8, cut_rooms),
    "room messages lost": (6, lose_messages),
    "room messages repeated": (4, repeat_messages),
}
"""Faults in the form of ``faults.KINDS``."""
