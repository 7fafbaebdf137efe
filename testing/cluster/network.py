"""The network of a simulated cluster: links that are ordered and reliable while up, like zmq over a socket.

A link may suffer delay, silence (a partition), or a break that loses all messages under way. Some messages
arrive after the break was noticed in another way.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from weft.control.fleet import fleet_events as e
from weft.types import messages as m

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.engine_process import EngineProcess
    from testing.cluster.front import FrontProcess


class Link:
    """One connection of an API server to one process of an instance."""

    __slots__ = (
        "connection",
        "duplicate",
        "engine_process",
        "excused",
        "front",
        "held_until",
        "latency",
        "lingers",
        "number",
        "silence",
        "to_engine_process",
        "to_front",
        "unlinked",
        "up",
    )

    def __init__(
        self, number: int, front: FrontProcess, engine_process: EngineProcess, latency: float
    ) -> None:
        """Create an unconnected link. ``latency``: seconds of one message, at least."""
        self.number = number
        self.front = front
        self.engine_process = engine_process
        self.connection = f"{front.name}/{number}".encode()
        """The link's name at the engine. Each connection over the link has another name."""
        self.latency = latency
        self.up = False
        self.unlinked = False
        """True if the API server has given the link up."""
        self.lingers = False
        """True if messages to the API server, under way at the break, still arrive later."""
        self.held_until = 0.0
        """Time until which the link is silent in both directions."""
        self.duplicate = False
        """True if the next Submit is sent twice."""
        self.silence = 0.0
        """Seconds of silence imposed on the link."""
        self.excused = False
        """True if an incident of the link or the engine justifies giving the link up."""
        self.to_engine_process: deque[tuple[float, m.ToEngine]] = deque()
        self.to_front: deque[tuple[float, m.ToFront]] = deque()

    @property
    def idle(self) -> bool:
        """True if no message under way will arrive."""
        return not ((self.up and self.to_engine_process) or ((self.up or self.lingers) and self.to_front))


class Network:
    """Carries messages over links, in order."""

    def __init__(self, cluster: Cluster) -> None:
        """``cluster``: has the time, the random generator and the log."""
        self._cluster = cluster
        self.lost = 0
        """Number of messages lost, on broken links or sent while a link was down."""
        self.remakes = False
        """True if broken links reconnect: between hosts, where processes outlive a connection."""

    def to_engine_process(self, link: Link, message: m.ToEngine) -> None:
        """Queue ``message`` for the engine, twice for a planned fault; lost without a connection."""
        cluster = self._cluster
        if cluster.logs:
            cluster.note(link.front.name, "->", link.engine_process.name, message)
        # A message over a broken link is lost: the sender has not noticed the break yet.
        if not link.up:
            self.lost += 1
            return
        at = self._arrival(link, link.to_engine_process[-1][0] if link.to_engine_process else 0.0)
        link.to_engine_process.append((at, message))
        # Only the first message has a scheduled delivery, so messages stay in order.
        if len(link.to_engine_process) == 1:
            cluster.at(at, link.engine_process, self._deliver_to_engine_process, link)
        if link.duplicate and isinstance(message, m.Submit):
            link.duplicate = False
            link.to_engine_process.append((at, message))
            cluster.happened("submit sent twice")
            cluster.note(link.front.name, "->", link.engine_process.name, "the same Submit again")

    def to_front(self, link: Link, message: m.ToFront) -> None:
        """Queue ``message`` for the API server; lost without a connection."""
        cluster = self._cluster
        # A message over a broken link is lost: the sender has not noticed the break yet.
        if not link.up:
            self.lost += 1
            return
        at = self._arrival(link, link.to_front[-1][0] if link.to_front else 0.0)
        link.to_front.append((at, message))
        # Only the first message has a scheduled delivery, so messages stay in order.
        if len(link.to_front) == 1:
            cluster.at(at, link.front, self._deliver_to_front, link)

    def hold(self, link: Link, seconds: float) -> None:
        """Silence the link in both directions for ``seconds``; afterwards all held messages arrive."""
        link.held_until = max(link.held_until, self._cluster.now + seconds)
        link.silence += seconds

    def cut(self, link: Link, lingers: bool) -> int:
        """Break the link for good.

        Return the number of lost messages; 0 if broken already. ``lingers``: messages to the API server still
        arrive.
        """
        if not link.up:
            return 0
        link.up = False
        link.lingers = lingers
        gone = len(link.to_engine_process) + (0 if lingers else len(link.to_front))
        self.lost += gone
        return gone

    def reset(self, link: Link) -> bool:
        """Break the connection, and later make another one to the same process. Return True if it was up.

        All messages under way are lost in both directions. The engine may notice the end of the old
        connection before the new connection, or long after.
        """
        if not link.up:
            return False
        cluster = self._cluster
        rng, now = cluster.rng, cluster.now
        self.cut(link, lingers=False)
        seconds = rng.uniform(0.01, 0.3) if rng.random() < 0.7 else rng.uniform(1.0, 3.0)
        unnoticed = rng.random() * rng.choice((0.05, 0.05, 4.0))
        # A connection that comes back while steps still run meets what the old connection left behind.
        if cluster.eager and rng.random() < 0.6:
            seconds, unnoticed = seconds / 20.0, rng.random() * 4.0
        # The new connection keeps the link's number, but the engine sees another name.
        again = Link(link.number, link.front, link.engine_process, link.latency)
        again.connection = link.connection + b"+"
        again.excused, again.held_until = link.excused, now + seconds
        again.silence = link.silence + seconds
        link.front.links[link.number] = again
        cluster.note(
            link.front.name,
            "..",
            link.engine_process.name,
            f"link {link.number} is reset for {seconds:.3f} s",
        )
        if seconds >= 1.0:
            cluster.at(now + 0.5, link.front, self._unreachable, again)
        cluster.at(now + seconds, None, self._connect_again, again)
        cluster.at(now + unnoticed, link.engine_process, link.engine_process.forget, link)
        return True

    def _unreachable(self, link: Link) -> None:
        """Report a long time without a connection."""
        if link.front.links[link.number] is link and not link.up and not link.unlinked:
            link.front.feed(e.Unreachable(link.engine_process.instance, link.number))

    def _connect_again(self, link: Link) -> None:
        if link.engine_process.alive and not link.unlinked:
            self._cluster.count("connections made again")
        self._cluster.connect(link)

    def _arrival(self, link: Link, after: float) -> float:
        cluster = self._cluster
        due = cluster.now + link.latency * (1.0 + cluster.rng.random())
        return due if due > after else after

    def _deliver_to_engine_process(self, link: Link) -> None:
        """Deliver due messages in order and schedule the next delivery. A silent link delays all."""
        now = self._cluster.now
        queue = link.to_engine_process
        if not link.up:
            return
        if now < link.held_until:
            self._cluster.at(link.held_until, link.engine_process, self._deliver_to_engine_process, link)
            return
        while queue and queue[0][0] <= now and link.up and link.engine_process.alive:
            link.engine_process.receive(link, queue.popleft()[1])
        if queue and link.up:
            self._cluster.at(queue[0][0], link.engine_process, self._deliver_to_engine_process, link)

    def _deliver_to_front(self, link: Link) -> None:
        """Deliver due messages in order and schedule the next delivery. A silent link delays all."""
        now = self._cluster.now
        # Deliver in order. An early message, or a silent link, schedules the next call.
        queue = link.to_front
        if not (link.up or link.lingers):
            return
        if now < link.held_until:
            self._cluster.at(link.held_until, link.front, self._deliver_to_front, link)
            return
        while queue and queue[0][0] <= now and (link.up or link.lingers) and link.front.alive:
            link.front.receive(link, queue.popleft()[1])
        if queue and (link.up or link.lingers):
            self._cluster.at(queue[0][0], link.front, self._deliver_to_front, link)
