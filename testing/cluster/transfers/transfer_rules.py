"""Rules for the memory that transfers write and read, from the knowledge of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testing.cluster.check import require
from weft.types.frames import Cache
from weft.types.transfer import TransferKey

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.engine_process import EngineProcess
    from testing.cluster.ranks import RankProcess, Replica


class TransferRules:
    """Rules for KV transfers, in the cache of one rank's process."""

    cache: Cache = "kv"

    def __init__(self, cluster: Cluster, replica: Replica, process: RankProcess | EngineProcess) -> None:
        self._cluster, self._replica, self._process = cluster, replica, process

    def _engine_process(self) -> EngineProcess | None:
        """Return the engine that the process works for; None if the process is no rank of a live group."""
        group, process = self._replica.group, self._process
        if group is None or group.closed:
            return None
        engine_process = self._cluster.supervisor.engine_processes[self._replica.name]
        living = self._replica.living.values()
        mine = engine_process is process or any(one is process and one.group is group for one in living)
        return engine_process if mine else None

    def check_write(self, key: TransferKey, blocks: set[int]) -> None:
        """Raise Violation unless ``blocks`` are pinned for the transfer, so no other sequence has the
        blocks."""
        engine_process = self._engine_process()
        if engine_process is None:  # the memory is unused until all transfers are stopped
            return
        held = engine_process.engine.held_for(self.cache, key)
        wrong = f"{engine_process.name}: a write of {key} lands in blocks {sorted(blocks)}"
        require(held is not None, f"{wrong} after its transfer has ended")
        assert held is not None
        require(blocks <= held, f"{wrong}, and pinned for it are {sorted(held)}")

    def check_read(self, key: TransferKey) -> None:
        """Raise Violation unless the sender of the transfer still pins the memory that is read now."""
        sender, engine_process = (
            self._cluster.transfers.engine_processes.get(key.incarnation),
            self._engine_process(),
        )
        if (
            sender is None or not sender.alive or engine_process is None
        ):  # no engine will use the received data
            return
        held = sender.engine.held_for(self.cache, key)
        require(
            held is not None,
            f"{engine_process.name} reads what {sender.name} sends of {key}, which has ended there",
        )

    def check_corrupt(self, key: TransferKey) -> None:
        """Handle wrong digests.

        Raise Violation unless bytes were changed on the way, or the sender or this process has no engine any
        more.
        """
        cluster = self._cluster
        if key in cluster.transfers.wires.flipped:
            cluster.happened("bytes changed")
            return
        sender = cluster.transfers.engine_processes.get(key.incarnation)
        gone = sender is None or not sender.alive or self._engine_process() is None
        require(gone, f"digests of {key} were wrong, and nobody had changed a byte of it")

    def transfer_news(self) -> None:
        """Notify the process of news of the transfers."""
        self._process.transfer_news()
