"""The control channel within one process, on virtual time, with planted faults.

Nothing runs in the background. Each rank is a function passed to ``drive``. While the engine waits, ranks
take turns. When no rank has anything to do, time moves to the next delivery or to the end of the engine's
wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.common.clock import Clock, VirtualClock
from weft.parallel.control import EngineChannel, PeerGone, RankChannel

Deed = Callable[[bytes], Sequence[bytes]]
"""Function from a sent frame to the delivered frames: none, one or several."""


@dataclass(slots=True)
class LinkFault:
    """A fault of one link. ``at`` is the number of the affected frame, from 0; None affects every frame."""

    peer: bytes
    to_rank: bool
    at: int | None = None
    deed: Deed = lambda data: [data]
    delay: float = 0.0
    """Seconds added to the delivery; later frames may overtake."""
    hits: int = 0
    """Number of affected frames so far."""


def lose(data: bytes) -> Sequence[bytes]:
    """Lose the frame."""
    return []


def repeat(data: bytes) -> Sequence[bytes]:
    """Deliver the frame twice."""
    return [data, data]


@dataclass(slots=True)
class _Link:
    """One direction between the engine and one peer."""

    clock: Clock
    frames: deque[tuple[float, bytes]] = field(default_factory=deque)
    sent: int = 0
    faults: list[LinkFault] = field(default_factory=list)

    def put(self, data: bytes) -> None:
        """Queue ``data`` after the faults of the link have changed, dropped or delayed it.

        Count faults hit.
        """
        number = self.sent
        made = [data]
        due = self.clock.now()
        self.sent += 1
        for fault in self.faults:
            if fault.at is None or fault.at == number:
                fault.hits += 1
                made = [one for frame in made for one in fault.deed(frame)]
                due += fault.delay
        self.frames.extend((due, frame) for frame in made)

    def take(self) -> bytes | None:
        """Remove and return the first frame due by now, or None."""
        now = self.clock.now()
        # A delayed frame is overtaken by later frames.
        for number, (due, data) in enumerate(self.frames):
            if due <= now:
                del self.frames[number]
                return data
        return None

    def next_due(self) -> float | None:
        return min((due for due, _ in self.frames), default=None)


class Loopback:
    """The control channel of one group within one process, with all links."""

    def __init__(self, clock: VirtualClock, faults: Sequence[LinkFault] = ()) -> None:
        """``clock``: decides when a delayed frame arrives. ``faults``: of all links."""
        self.clock = clock
        self._faults = list(faults)
        self._links: dict[tuple[bytes, bool], _Link] = {}
        self._turns: dict[bytes, Callable[[], bool]] = {}
        self._cut: dict[bytes, None] = {}
        self._last = b""

    def plant(self, fault: LinkFault) -> None:
        """Add a fault. ``at`` counts frames since the link's first frame."""
        self._faults.append(fault)
        link = self._links.get((fault.peer, fault.to_rank))
        if link is not None:  # a later link begins with its faults
            link.faults.append(fault)

    def sent(self, peer: bytes, to_rank: bool) -> int:
        """Return the number of frames sent over a link so far, which is the number of the next frame."""
        return self._link(peer, to_rank).sent

    def drive(self, peer: bytes, turn: Callable[[], bool]) -> None:
        """Register ``turn`` as the rank behind ``peer``. ``turn()`` returns False if there was nothing
        to do."""
        self._turns[peer] = turn

    def cut(self, peer: bytes) -> None:
        """Mark the peer as gone: no more turns, and frames to the peer raise PeerGone."""
        self._cut[peer] = None

    def engine(self) -> LoopbackEngineChannel:
        """Return the engine's end."""
        return LoopbackEngineChannel(self)

    def rank(self, peer: bytes) -> LoopbackRank:
        """Return the end of ``peer``, and make the peer known."""
        self._link(peer, True)
        return LoopbackRank(self, peer)

    def turn(self) -> bool:
        """Give every rank a turn. Return False if no rank had anything to do."""
        busy = [turn() for peer, turn in list(self._turns.items()) if peer not in self._cut]
        return any(busy)

    # ---- used by the ends

    def _link(self, peer: bytes, to_rank: bool) -> _Link:
        """Return the link of one direction, created with its faults at first use."""
        link = self._links.get((peer, to_rank))
        if link is None:
            link = self._links[peer, to_rank] = _Link(self.clock)
            link.faults = [f for f in self._faults if f.peer == peer and f.to_rank == to_rank]
        return link

    def put(self, peer: bytes, to_rank: bool, data: bytes) -> None:
        """Queue a frame. Raise PeerGone for a peer that is cut or unknown."""
        if peer in self._cut or (peer, True) not in self._links:
            raise PeerGone("the peer is gone")
        self._link(peer, to_rank).put(data)

    def take_for_engine(self) -> tuple[bytes, bytes] | None:
        """Remove and return (peer, next frame) for the engine, round robin over the peers; None if nothing
        has arrived.
        """
        peers = [peer for peer, to_rank in self._links if not to_rank]
        # Begin after the last served peer, so no peer starves.
        later = [peer for peer in peers if peer > self._last]
        for peer in [*later, *peers]:
            data = self._links[peer, False].take()
            if data is not None:
                self._last = peer
                return peer, data
        return None

    def take_for(self, peer: bytes) -> bytes | None:
        """Return the next frame for ``peer``; None if nothing has arrived."""
        return self._link(peer, True).take()

    def wait(self, until: float) -> bool:
        """Move time to the next delivery, at most to ``until``. Return False if time was at ``until``
        already."""
        if self.clock.now() >= until:
            return False
        due = [link.next_due() for link in self._links.values()]
        self.clock.advance_to(min([until, *(d for d in due if d is not None and d > self.clock.now())]))
        return True


class LoopbackEngineChannel(EngineChannel):
    """The engine's end of a ``Loopback``."""

    address = "loopback"

    def __init__(self, net: Loopback) -> None:
        self._net = net

    def send(self, peer: bytes, data: bytes) -> None:
        self._net.put(peer, True, data)

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Let the ranks work and return (peer, frame); None after ``timeout`` seconds of virtual time."""
        until = self._net.clock.now() + timeout
        while True:
            busy = self._net.turn()
            result = self._net.take_for_engine()
            if result is not None or (timeout <= 0 and not busy):
                return result
            if not busy and not self._net.wait(until):
                return None

    def close(self) -> None:
        pass


class LoopbackRank(RankChannel):
    """A rank's end of a ``Loopback``. ``receive`` never waits."""

    def __init__(self, net: Loopback, peer: bytes) -> None:
        self._net = net
        self._peer = peer

    def send(self, data: bytes) -> None:
        self._net.put(self._peer, False, data)

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> bytes | None:
        return self._net.take_for(self._peer)

    def close(self, deliver: bool = True) -> None:
        self._net.cut(self._peer)
