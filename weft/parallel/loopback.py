"""The control channel within one process, on virtual time, with faults that are planted as data.

Nothing runs by itself. A rank is a function that ``drive`` was given; while the head waits, ranks take their
turns, and when none has anything to do, time moves: to the next delivery, or to the end of the head's wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.common.clock import Clock, VirtualClock
from weft.parallel.control import HeadChannel, PeerGone, RankChannel

Deed = Callable[[bytes], Sequence[bytes]]
"""What becomes of a frame: none, one or several that are delivered in its place."""


@dataclass(slots=True)
class LinkFault:
    """Befalls frames on one link. ``at``: which of them, counted from 0; None for every one."""

    peer: bytes
    to_rank: bool
    at: int | None = None
    deed: Deed = lambda data: [data]
    delay: float = 0.0
    """Seconds that frames stay away; later ones overtake them."""
    hits: int = 0
    """Frames that it befell."""


def lose(data: bytes) -> Sequence[bytes]:
    """The frame never arrives."""
    return []


def repeat(data: bytes) -> Sequence[bytes]:
    """The frame arrives twice."""
    return [data, data]


@dataclass(slots=True)
class _Link:
    """One direction between the head and one peer."""

    clock: Clock
    frames: deque[tuple[float, bytes]] = field(default_factory=deque)
    sent: int = 0
    faults: list[LinkFault] = field(default_factory=list)

    def put(self, data: bytes) -> None:
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
        now = self.clock.now()
        for number, (due, data) in enumerate(self.frames):
            if due <= now:
                del self.frames[number]
                return data
        return None

    def next_due(self) -> float | None:
        return min((due for due, _ in self.frames), default=None)


class Loopback:
    """The control channel of one group within one process: all of its links."""

    def __init__(self, clock: VirtualClock, faults: Sequence[LinkFault] = ()) -> None:
        self.clock = clock
        self._faults = list(faults)
        self._links: dict[tuple[bytes, bool], _Link] = {}
        self._turns: dict[bytes, Callable[[], bool]] = {}
        self._cut: dict[bytes, None] = {}
        self._last = b""

    def plant(self, fault: LinkFault) -> None:
        """Adds a fault; its ``at`` counts frames since the link's first."""
        self._faults.append(fault)
        self._link(fault.peer, fault.to_rank).faults.append(fault)

    def sent(self, peer: bytes, to_rank: bool) -> int:
        """Frames that were sent over a link so far: the number of the next one."""
        return self._link(peer, to_rank).sent

    def drive(self, peer: bytes, turn: Callable[[], bool]) -> None:
        """``turn()`` lets the rank behind ``peer`` do something; False when there was nothing to do."""
        self._turns[peer] = turn

    def cut(self, peer: bytes) -> None:
        """The peer is gone: it takes no more turns, and nothing can be sent to it."""
        self._cut[peer] = None

    def head(self) -> LoopbackHead:
        """The head's end."""
        return LoopbackHead(self)

    def rank(self, peer: bytes) -> LoopbackRank:
        """The end of ``peer``."""
        self._link(peer, True)
        return LoopbackRank(self, peer)

    def turn(self) -> bool:
        """Every rank has a turn. False when none had anything to do."""
        busy = [turn() for peer, turn in list(self._turns.items()) if peer not in self._cut]
        return any(busy)

    # ---- what the ends use

    def _link(self, peer: bytes, to_rank: bool) -> _Link:
        link = self._links.get((peer, to_rank))
        if link is None:
            link = self._links[peer, to_rank] = _Link(self.clock)
            link.faults = [f for f in self._faults if f.peer == peer and f.to_rank == to_rank]
        return link

    def put(self, peer: bytes, to_rank: bool, data: bytes) -> None:
        """Raises PeerGone for a peer that was cut, or that there never was."""
        if peer in self._cut or (peer, True) not in self._links:
            raise PeerGone("the peer is gone")
        self._link(peer, to_rank).put(data)

    def take_for_head(self) -> tuple[bytes, bytes] | None:
        """The next frame for the head, of each peer in turn."""
        peers = [peer for peer, to_rank in self._links if not to_rank]
        later = [peer for peer in peers if peer > self._last]
        for peer in [*later, *peers]:
            data = self._links[peer, False].take()
            if data is not None:
                self._last = peer
                return peer, data
        return None

    def take_for(self, peer: bytes) -> bytes | None:
        """The next frame for ``peer``."""
        return self._link(peer, True).take()

    def wait(self, until: float) -> bool:
        """Moves time to the next delivery, at most to ``until``. False when it was there already."""
        if self.clock.now() >= until:
            return False
        due = [link.next_due() for link in self._links.values()]
        self.clock.advance_to(min([until, *(d for d in due if d is not None and d > self.clock.now())]))
        return True


class LoopbackHead(HeadChannel):
    """The head's end of a ``Loopback``."""

    address = "loopback"

    def __init__(self, net: Loopback) -> None:
        self._net = net

    def send(self, peer: bytes, data: bytes) -> None:
        self._net.put(peer, True, data)

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        until = self._net.clock.now() + timeout
        while True:
            busy = self._net.turn()
            result = self._net.take_for_head()
            if result is not None or (timeout <= 0 and not busy):
                return result
            if not busy and not self._net.wait(until):
                return None

    def close(self) -> None:
        pass


class LoopbackRank(RankChannel):
    """A rank's end of a ``Loopback``. It never waits."""

    def __init__(self, net: Loopback, peer: bytes) -> None:
        self._net = net
        self._peer = peer

    def send(self, data: bytes) -> None:
        self._net.put(self._peer, False, data)

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> bytes | None:
        return self._net.take_for(self._peer)

    def close(self, deliver: bool = True) -> None:
        self._net.cut(self._peer)
