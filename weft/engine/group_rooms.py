"""Rooms and the ranks of one group: what all of them are to do, and what they say.

To this rank's own transfers words go by a call, to the others by frames, in order with those of steps. Ranks
are numbered within the group here, as ``weft.transfer`` has them: 0 is the head's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from weft.common.errors import EngineDead
from weft.transfer import events as ev
from weft.types import frames as f
from weft.types.rooms import Admitted, Blocks, Bound, Endpoint, GroupDims, RoomKey

RankWord = ev.RankReport | ev.RankStopped | ev.RankGone


class OwnTransfer(Protocol):
    """This rank's ``RankTransfer``."""

    @property
    def dims(self) -> GroupDims: ...

    def begin(
        self, offer: Admitted, bound: Bound, blocks: tuple[Blocks, ...], num_cached: int = 0
    ) -> None: ...

    @property
    def failure(self) -> Exception | None: ...

    def expect(self, offer: Admitted, bound: Bound) -> None: ...

    def stop(self, key: RoomKey) -> None: ...


class OwnReports(Protocol):
    """What the head's own rank tells of rooms."""

    @property
    def descriptor(self) -> int: ...

    def take(self) -> list[ev.RankReport | ev.RankStopped]: ...


class GroupRooms:
    """Rooms on the ranks of a group: the head's side. Used from the thread that steps, but for ``ended``."""

    def __init__(
        self,
        own: OwnTransfer,
        reports: OwnReports,
        endpoints: Callable[[], Sequence[Endpoint | None]],
        others: Mapping[int, int],
        send: Callable[[int, bytes], None],
        sockets: Sequence[Any] = (),
        cache: f.Cache = "kv",
    ) -> None:
        """``endpoints()``: of all ranks in order, as far as they have said. ``others``: each other rank as
        frames name it, and its number here. ``send(rank, frame)`` does not wait. ``sockets``: of frames.
        ``cache``: what the rooms move."""
        self._own, self._reports = own, reports
        self._endpoints, self._others, self._send = endpoints, dict(others), send
        self._cache = cache
        self._sockets = [reports.descriptor, *sockets]
        self._said: deque[RankWord] = deque()

    @property
    def dims(self) -> GroupDims:
        """The caches of the group."""
        return self._own.dims

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(1 + len(self._others))

    @property
    def sockets(self) -> Sequence[Any]:
        """Readable when ranks have said something."""
        return self._sockets

    def endpoints(self) -> tuple[Endpoint, ...] | None:
        """Where each rank takes bytes; None unless all have said it."""
        known = tuple(endpoint for endpoint in self._endpoints() if endpoint is not None)
        return known if len(known) == len(self.ranks) else None

    def send(self, frame: f.RoomToRank) -> None:
        """Has every rank carry it out, as far as frames reach them."""
        match frame:
            case f.PushRoom(offer=offer, bound=bound, blocks=blocks, num_cached=num_cached):
                self._own.begin(offer, bound, blocks, num_cached)
            case f.ExpectRoom(offer=offer, bound=bound):
                self._own.expect(offer, bound)
            case f.StopRoom(key=key):
                self._own.stop(key)
        if self._others:
            data = f.encode(msgspec.structs.replace(frame, cache=self._cache))
            for rank in self._others:
                self._send(rank, data)

    def heard(self, frame: f.RoomToHead) -> None:
        """A rank of this group sent it."""
        number = self._others[frame.rank]
        match frame:
            case f.RoomReport(key=key, outcome=outcome, error=error):
                self._said.append(ev.RankReport(key, number, outcome, error))
            case f.RoomStopped(key=key):
                self._said.append(ev.RankStopped(key, number))

    def ended(self, rank: int) -> None:
        """The process that was ``rank``, as frames name it, has ended. From any thread."""
        if rank in self._others:
            self._said.append(ev.RankGone(self._others[rank]))

    def take(self) -> list[RankWord]:
        """What ranks have said since the last call, and which have ended. Cheap when there is nothing. Raises
        EngineDead when this process can have no part in transfers any more: another one can.
        """
        if self._own.failure is not None:
            raise EngineDead("the head's thread that moves caches between groups has failed")
        said: list[RankWord] = []
        for word in self._reports.take():
            said.append(_of_head(word))
        while self._said:
            said.append(self._said.popleft())
        return said


def _of_head(word: ev.RankReport | ev.RankStopped) -> RankWord:
    """A word of the head's own rank, which is 0 here, whatever it is called there."""
    if isinstance(word, ev.RankReport):
        return ev.RankReport(word.key, 0, word.outcome, word.error)
    return ev.RankStopped(word.key, 0)
