"""Transfer messages between simulated engines, and how engines notice the end of others.

Messages may be lost, repeated and late, and may overtake each other. A partition loses all messages for a
while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.engine.disagg.peers import PeerProcess
from weft.engine.disagg.transfer_channel import Arrived
from weft.types import transfer as r
from weft.types.frames import Cache
from weft.types.transfer import Peer

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.engine_process import EngineProcess


class TransferNetwork:
    """The network for transfer messages between the engines of one cluster."""

    def __init__(self, cluster: Cluster, loss: float, repeat: float, delay: float, sees_ends: bool) -> None:
        """Create the network. ``loss`` and ``repeat`` are shares of messages.

        ``sees_ends`` is True if engines notice the end of other processes, as on one host.
        """
        self.cluster = cluster
        self.loss, self.repeat, self.delay, self.sees_ends = loss, repeat, delay, sees_ends
        self.cut: dict[frozenset[str], float] = {}
        """Pair of engines -> time until which no message passes."""
        self._channels: dict[str, SimChannel] = {}

    def join(self, channel: SimChannel) -> None:
        """Make the channel reachable by address."""
        self._channels[channel.address] = channel

    def engine_process(self, peer: Peer) -> EngineProcess | None:
        """Return the process of a peer, alive or not; None if unknown."""
        channel = self._channels.get(peer.name)
        return None if channel is None else channel.engine_process

    def send(self, engine_process: EngineProcess, peer: Peer, arrived: Arrived) -> None:
        """Send a message of ``engine_process`` to ``peer``, subject to cuts, losses and repetitions.

        An unknown peer gets nothing.
        """
        cluster, channel = self.cluster, self._channels.get(peer.name)
        if cluster.logs and arrived.body:
            cluster.note(engine_process.name, "~>", peer.name, r.decode(arrived.body))
        if channel is None:
            return
        rng, other = cluster.rng, channel.engine_process
        # Each fault counts only once a message is affected.
        if self.cut.get(frozenset((engine_process.name, other.name)), 0.0) > cluster.now:
            cluster.happened("room messages cut")
            return
        if rng.random() < self.loss:
            cluster.happened("room messages lost")
            return
        repeated = rng.random() < self.repeat
        if repeated:
            cluster.happened("room messages repeated")
        for _ in range(1 + repeated):
            late = self.delay * rng.random() * (8.0 if rng.random() < 0.1 else 1.0)
            cluster.at(cluster.now + late, other, other.transfer_message, channel, arrived)


class SimChannel:
    """A ``TransferChannel`` of a simulated engine."""

    bad = 0
    sockets: Sequence[Any] = ()

    def __init__(self, network: TransferNetwork, engine_process: EngineProcess, cache: Cache) -> None:
        """Open a channel for transfers of ``cache``."""
        self.address = (
            f"sim://{engine_process.name}" if cache == "kv" else f"sim://{engine_process.name}/{cache}"
        )
        self.came: deque[Arrived] = deque()
        self._network, self.engine_process = network, engine_process
        self._me = Peer(self.address, engine_process.incarnation)
        self._process = PeerProcess("sim", engine_process.number, 0)
        network.join(self)

    def send(self, peer: Peer, body: bytes, asks: bool) -> None:
        self._network.send(self.engine_process, peer, Arrived(self._me, self._process, asks, body))

    def receive(self) -> Arrived | None:
        return self.came.popleft() if self.came else None

    def drop(self, peer: Peer) -> None: ...

    def tidy(self) -> None: ...

    def close(self) -> None: ...


class SimPeers:
    """The ``Peers`` of a simulated engine."""

    sockets: Sequence[Any] = ()

    def __init__(self, network: TransferNetwork, engine_process: EngineProcess) -> None:
        self._network, self._engine_process = network, engine_process
        self._known: set[Peer] = set()
        self._ended: list[Peer] = []

    def knows(self, peer: Peer) -> bool:
        return peer in self._known

    def register(self, peer: Peer, process: PeerProcess) -> None:
        """Register a peer and its end, if visible here. Known peers are ignored."""
        if peer in self._known:
            return
        self._known.add(peer)
        other = self._network.engine_process(peer)
        if other is not None and self._network.sees_ends:
            if other.alive:
                other.watched_by.append((self, peer))
            else:
                self.end(peer)

    def end(self, peer: Peer) -> None:
        """Announce the end of the process of ``peer``. The engine notices soon."""
        self._network.cluster.after(0.0, 0.03, self._engine_process, self._noticed, peer)

    def _noticed(self, peer: Peer) -> None:
        self._ended.append(peer)
        self._engine_process.transfer_news()

    def look(self) -> None: ...

    def take(self) -> list[Peer]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None: ...
