"""Rules for the memory that transfers write and read, from the knowledge of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testing.cluster.check import require
from weft.types.frames import Cache
from weft.types.rooms import RoomKey

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.head import HeadProcess
    from testing.cluster.ranks import RankProcess, Replica


class RoomRules:
    """Rules for KV transfers, in the cache of one rank's process."""

    cache: Cache = "kv"

    def __init__(self, cluster: Cluster, replica: Replica, process: RankProcess | HeadProcess) -> None:
        self._cluster, self._replica, self._process = cluster, replica, process

    def _head(self) -> HeadProcess | None:
        """Return the engine that the process works for; None if the process is no rank of a live group."""
        group, process = self._replica.group, self._process
        if group is None or group.closed:
            return None
        head = self._cluster.supervisor.heads[self._replica.name]
        living = self._replica.living.values()
        mine = head is process or any(one is process and one.group is group for one in living)
        return head if mine else None

    def check_write(self, key: RoomKey, blocks: set[int]) -> None:
        """Raise Violation unless ``blocks`` are pinned for the transfer, so no other sequence has the
        blocks."""
        head = self._head()
        if head is None:  # the memory is unused until all transfers are stopped
            return
        held = head.engine.held_for(self.cache, key)
        wrong = f"{head.name}: a write of {key} lands in blocks {sorted(blocks)}"
        require(held is not None, f"{wrong} after its room has ended")
        assert held is not None
        require(blocks <= held, f"{wrong}, and on hold for it are {sorted(held)}")

    def check_read(self, key: RoomKey) -> None:
        """Raise Violation unless the sender of the transfer still pins the memory that is read now."""
        sender, head = self._cluster.rooms.heads.get(key.incarnation), self._head()
        if sender is None or not sender.alive or head is None:  # no engine will use the received data
            return
        held = sender.engine.held_for(self.cache, key)
        require(
            held is not None, f"{head.name} reads what {sender.name} sends of {key}, which has ended there"
        )

    def check_corrupt(self, key: RoomKey) -> None:
        """Handle wrong digests.

        Raise Violation unless bytes were changed on the way, or the sender or this process has no engine any
        more.
        """
        cluster = self._cluster
        if key in cluster.rooms.wires.flipped:
            cluster.happened("bytes changed")
            return
        sender = cluster.rooms.heads.get(key.incarnation)
        gone = sender is None or not sender.alive or self._head() is None
        require(gone, f"digests of {key} were wrong, and nobody had changed a byte of it")

    def room_news(self) -> None:
        """Notify the process of news of the transfers."""
        self._process.room_news()
