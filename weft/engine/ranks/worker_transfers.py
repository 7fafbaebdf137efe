"""The transfers of a worker rank: executes the engine's commands and returns the reports of the transfers.

Reports go only to the engine process that started the transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.common.errors import EngineDead
from weft.disagg.protocol.transfer_events import RankReport, RankStopped
from weft.runner.exports import TransferThread
from weft.types import frames as f
from weft.types.transfer import TransferKey


class WorkerTransfers:
    """The transfers of a worker for one cache type. Used from the thread that serves the engine process."""

    def __init__(self, rank: int, cache: f.Cache = "kv") -> None:
        self._rank, self._cache = rank, cache
        self._started: set[TransferKey] = set()
        """Transfers started and not stopped by the current engine process."""
        self._stopping: set[TransferKey] = set()
        """Transfers stopped by the current engine process, without a report of the end."""

    def joined(self, transfer: TransferThread | None) -> None:
        """Forget and stop all transfers of the previous engine process."""
        self._started.clear()
        self._stopping.clear()
        if transfer is not None:
            transfer.stop_all()

    def take(self, frame: f.TransferToRank, transfer: TransferThread | None) -> None:
        """Execute ``frame``: begin, expect or stop a transfer, and remember its key.

        Raises EngineDead if the rank has no transfers.
        """
        if transfer is None:
            raise EngineDead("a KV transfer was sent to a rank without KV transfers")
        if isinstance(frame, f.StopTransfer):
            self._started.discard(frame.key)
            self._stopping.add(frame.key)
            transfer.stop(frame.key)
            return
        self._started.add(frame.offer.key)
        if isinstance(frame, f.PushTransfer):
            transfer.begin(frame.offer, frame.bound, frame.blocks, frame.num_cached)
        else:
            transfer.expect(frame.offer, frame.bound)

    def frames_of(self, reports: Iterable[RankReport | RankStopped]) -> Iterator[f.TransferToEngine]:
        """Yield the frames of ``reports`` for the engine process.

        Reports about transfers of an earlier engine process are dropped. A completed stop is reported once.
        """
        for report in reports:
            if isinstance(report, RankReport):
                if report.key in self._started:
                    yield f.TransferReport(
                        rank=self._rank,
                        key=report.key,
                        outcome=report.outcome,
                        error=report.error,
                        cache=self._cache,
                    )
            elif report.key in self._stopping:
                self._stopping.discard(report.key)
                yield f.TransferStopped(rank=self._rank, key=report.key, cache=self._cache)
