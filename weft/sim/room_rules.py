"""What must hold of the memory that rooms write to and read from, as the cluster knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.sim.check import require
from weft.types.frames import Cache
from weft.types.rooms import RoomKey

if TYPE_CHECKING:
    from weft.sim.cluster import Cluster
    from weft.sim.head import HeadProcess
    from weft.sim.ranks import RankProcess, Replica


class RoomRules:
    """Rules for the cache of one rank's process, and rooms of caches of sequences."""

    cache: Cache = "kv"

    def __init__(self, cluster: Cluster, replica: Replica, process: RankProcess | HeadProcess) -> None:
        self._cluster, self._replica, self._process = cluster, replica, process

    def _head(self) -> HeadProcess | None:
        """The head for which this process works, if it is one of its ranks."""
        group, process = self._replica.group, self._process
        if group is None or group.closed:
            return None
        head = self._cluster.supervisor.heads[self._replica.name]
        living = self._replica.living.values()
        mine = head is process or any(one is process and one.group is group for one in living)
        return head if mine else None

    def check_write(self, key: RoomKey, blocks: set[int]) -> None:
        """Raises Violation unless ``blocks`` are on hold for the room: nobody else has them."""
        head = self._head()
        if head is None:  # nobody uses this memory before all rooms are stopped
            return
        held = head.engine.held_for(self.cache, key)
        wrong = f"{head.name}: a write of {key} lands in blocks {sorted(blocks)}"
        require(held is not None, f"{wrong} after its room has ended")
        assert held is not None
        require(blocks <= held, f"{wrong}, and on hold for it are {sorted(held)}")

    def check_read(self, key: RoomKey) -> None:
        """Raises Violation unless the sender of the room, whose memory is read now, keeps it for that."""
        sender, head = self._cluster.rooms.heads.get(key.incarnation), self._head()
        if sender is None or not sender.alive or head is None:  # no head lets the room land
            return
        held = sender.engine.held_for(self.cache, key)
        require(
            held is not None, f"{head.name} reads what {sender.name} sends of {key}, which has ended there"
        )

    def check_corrupt(self, key: RoomKey) -> None:
        """Digests were wrong. Raises Violation unless bytes were changed on the way."""
        cluster = self._cluster
        if key in cluster.rooms.wires.flipped:
            cluster.happened("bytes changed")
            return
        sender = cluster.rooms.heads.get(key.incarnation)
        gone = sender is None or not sender.alive or self._head() is None
        require(gone, f"digests of {key} were wrong, and nobody had changed a byte of it")

    def room_news(self) -> None:
        """The transfers have told something."""
        self._process.room_news()
