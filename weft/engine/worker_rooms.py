"""What a rank that is not its head's own does about rooms: it carries out what its head says, and passes on
what its transfers tell, to the head that named the room and to no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.common.errors import EngineDead
from weft.runner.exports import Transfer
from weft.transfer.events import RankReport, RankStopped
from weft.types import frames as f
from weft.types.rooms import RoomKey


class WorkerRooms:
    """A worker's rooms of one kind of transfers, used from the thread that serves its head."""

    def __init__(self, rank: int, cache: f.Cache = "kv") -> None:
        self._rank, self._cache = rank, cache
        self._named: set[RoomKey] = set()
        """Those that this head has named and not stopped."""
        self._stopping: set[RoomKey] = set()
        """Those that it is to be told the end of."""

    def joined(self, transfer: Transfer | None) -> None:
        """The rank works for another head: all rooms of the one before stop."""
        self._named.clear()
        self._stopping.clear()
        if transfer is not None:
            transfer.stop_all()

    def take(self, frame: f.RoomToRank, transfer: Transfer | None) -> None:
        """Carries ``frame`` out. Raises EngineDead where there is nothing to do so with."""
        if transfer is None:
            raise EngineDead("a transfer between groups came to a rank that takes part in none")
        if isinstance(frame, f.StopRoom):
            self._named.discard(frame.key)
            self._stopping.add(frame.key)
            transfer.stop(frame.key)
            return
        self._named.add(frame.offer.key)
        if isinstance(frame, f.PushRoom):
            transfer.begin(frame.offer, frame.bound, frame.blocks, frame.num_cached)
        else:
            transfer.expect(frame.offer, frame.bound)

    def said(self, words: Iterable[RankReport | RankStopped]) -> Iterator[f.RoomToHead]:
        """What the head is to hear of what the rank's transfers have told."""
        for word in words:
            if isinstance(word, RankReport):
                if word.key in self._named:
                    yield f.RoomReport(
                        rank=self._rank,
                        key=word.key,
                        outcome=word.outcome,
                        error=word.error,
                        cache=self._cache,
                    )
            elif word.key in self._stopping:
                self._stopping.discard(word.key)
                yield f.RoomStopped(rank=self._rank, key=word.key, cache=self._cache)
