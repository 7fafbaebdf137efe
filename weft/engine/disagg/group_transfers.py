"""The transfers on the ranks of one group: commands from the engine process to all ranks, and the reports of
the ranks.

The engine's own rank is reached by calls. Other ranks are reached by frames, in order with the frames of
steps. Ranks have numbers within the group here, as in ``weft.disagg.protocol``: number 0 is the engine's
rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from weft.common.errors import EngineDead
from weft.disagg.protocol import transfer_events as ev
from weft.types import frames as f
from weft.types.transfer import Admitted, Blocks, Bound, Endpoint, GroupDims, TransferKey

RankEvent = ev.RankReport | ev.RankStopped | ev.RankGone


class OwnTransfer(Protocol):
    """The ``RankTransfer`` of the engine's rank."""

    @property
    def dims(self) -> GroupDims: ...

    def begin(
        self, offer: Admitted, bound: Bound, blocks: tuple[Blocks, ...], num_cached: int = 0
    ) -> None: ...

    @property
    def failure(self) -> Exception | None: ...

    def expect(self, offer: Admitted, bound: Bound) -> None: ...

    def stop(self, key: TransferKey) -> None: ...


class OwnReports(Protocol):
    """Reports of the engine's own rank about transfers."""

    @property
    def descriptor(self) -> int: ...

    def take(self) -> list[ev.RankReport | ev.RankStopped]: ...


class GroupTransfers:
    """The engine's side of the transfers on all ranks of a group. Used from the stepping thread, except
    ``ended``.
    """

    def __init__(
        self,
        own: OwnTransfer,
        reports: OwnReports,
        endpoints: Callable[[], Sequence[Endpoint | None]],
        others: Mapping[int, int],
        send: Callable[[int, bytes], object],
        sockets: Sequence[Any] = (),
        cache: f.Cache = "kv",
    ) -> None:
        """``own`` and ``reports`` belong to the engine's rank. ``endpoints()`` returns the endpoints of all
        ranks in order, None for a rank without a report. ``others``: frame rank -> number within the group.
        ``send(rank, frame)`` must not block. ``sockets``: sockets for frames. ``cache``: the cache type of
        the transfers.
        """
        self._own, self._reports = own, reports
        self._endpoints, self._others, self._send = endpoints, dict(others), send
        self._cache = cache
        self._sockets = [reports.descriptor, *sockets]
        self._events: deque[RankEvent] = deque()

    @property
    def dims(self) -> GroupDims:
        """Dimensions of the caches of the group."""
        return self._own.dims

    @property
    def ranks(self) -> range:
        """Numbers of all ranks."""
        return range(1 + len(self._others))

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets and descriptors, readable when ranks have sent reports."""
        return self._sockets

    def endpoints(self) -> tuple[Endpoint, ...] | None:
        """Return the endpoint of each rank, or None until all ranks have reported an endpoint."""
        known = tuple(endpoint for endpoint in self._endpoints() if endpoint is not None)
        return known if len(known) == len(self.ranks) else None

    def send(self, frame: f.TransferToRank) -> None:
        """Execute the command on every rank: by a call on the own rank, by a frame elsewhere.

        A rank without a connection misses the command.
        """
        match frame:
            case f.PushTransfer(offer=offer, bound=bound, blocks=blocks, num_cached=num_cached):
                self._own.begin(offer, bound, blocks, num_cached)
            case f.ExpectTransfer(offer=offer, bound=bound):
                self._own.expect(offer, bound)
            case f.StopTransfer(key=key):
                self._own.stop(key)
        # Encode once: every other rank gets the same bytes.
        if self._others:
            data = f.encode(msgspec.structs.replace(frame, cache=self._cache))
            for rank in self._others:
                self._send(rank, data)

    def report(self, frame: f.TransferToEngine) -> None:
        """Queue a report from another rank of the group."""
        number = self._others[frame.rank]
        match frame:
            case f.TransferReport(key=key, outcome=outcome, error=error):
                self._events.append(ev.RankReport(key, number, outcome, error))
            case f.TransferStopped(key=key):
                self._events.append(ev.RankStopped(key, number))

    def ended(self, rank: int) -> None:
        """Queue the end of the process with frame rank ``rank``. Safe from any thread."""
        if rank in self._others:
            self._events.append(ev.RankGone(self._others[rank]))

    def take(self) -> list[RankEvent]:
        """Remove and return the reports of all ranks and the ended ranks, in order of arrival.

        Cheap when there are none.

        Raises EngineDead when the transfer thread of the process has failed. A new process can transfer
        again.
        """
        if self._own.failure is not None:
            raise EngineDead("the engine's KV transfer thread has failed")
        events: list[RankEvent] = []
        for event in self._reports.take():
            events.append(_of_engine(event))
        # Another thread may append an end of a process meanwhile (`ended`), so drain with popleft.
        while self._events:
            events.append(self._events.popleft())
        return events


def _of_engine(event: ev.RankReport | ev.RankStopped) -> RankEvent:
    """Return the report with rank 0: frames and local transfers number the engine's rank differently."""
    if isinstance(event, ev.RankReport):
        return ev.RankReport(event.key, 0, event.outcome, event.error)
    return ev.RankStopped(event.key, 0)
