"""Two engines with transfers on virtual time: real ``EngineTransfers``, fake network, ranks and schedulers.

The schedulers watch their blocks. Reuse of a block while a transfer may touch the block is a ``Violation``.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from tests.disagg.protocol.memory import KINDS, Group
from weft.common.clock import VirtualClock
from weft.common.errors import Unavailable
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.transfer_table import TransferPatience
from weft.engine.disagg.engine_transfers import EngineTransfers
from weft.engine.disagg.group_transfers import RankEvent
from weft.engine.disagg.peers import PeerProcess, PeerWatch, own_process
from weft.engine.disagg.transfer_channel import Arrived
from weft.types import frames as f
from weft.types import transfer as r
from weft.types.messages import TokenEvent
from weft.types.transfer import Endpoint, Outcome, Peer, TransferKey, TransferParameters

RANKS, BLOCKS, PROMPT = 2, 64, 10
GROUP = Group([KINDS["full"]], RANKS, 4, BLOCKS)
PATIENCE = TransferPatience(retry=0.5, bind=20.0, fence=3.0, remember=120.0)
ERROR = Unavailable("planted").info()


class Violation(AssertionError):
    """A block was used twice at the same time."""


class Net:
    """A network between engines that delays, duplicates and drops messages."""

    def __init__(self, clock: VirtualClock, rng: random.Random, loss: float = 0.0) -> None:
        self.clock, self.rng, self.loss = clock, rng, loss
        self.boxes: dict[str, list[tuple[float, int, Arrived]]] = {}
        self.sent = 0

    def post(self, to: str, message: Arrived) -> None:
        if self.rng.random() < self.loss:
            return
        for _ in range(1 + (self.rng.random() < self.loss)):
            self.sent += 1
            due = self.clock.now() + (self.rng.random() if self.loss else 0.0)
            heapq.heappush(self.boxes.setdefault(to, []), (due, self.sent, message))


class FakeChannel:
    """A ``TransferChannel`` over the fake network."""

    sockets: Sequence[Any] = ()
    bad = 0

    def __init__(self, net: Net, me: Peer, process: PeerProcess) -> None:
        self.net, self.me, self.process = net, me, process
        self.address = me.name
        self.dropped: list[Peer] = []
        self.closed = False

    def send(self, peer: Peer, body: bytes, asks: bool) -> None:
        self.net.post(peer.name, Arrived(self.me, self.process, asks, body))

    def receive(self) -> Arrived | None:
        box = self.net.boxes.get(self.address)
        if not box or box[0][0] > self.net.clock.now():
            return None
        return heapq.heappop(box)[2]

    def drop(self, peer: Peer) -> None:
        self.dropped.append(peer)

    def tidy(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class FakeRanks:
    """The ranks of a group. The ranks move nothing and report what the test sets."""

    dims = GROUP.dims
    ranks = range(RANKS)
    sockets: Sequence[Any] = ()

    def __init__(self, transport: str = "shm") -> None:
        self.transport = transport
        self.frames: list[f.TransferToRank] = []
        self.said: deque[RankEvent] = deque()
        self.busy: set[TransferKey] = set()
        """Transfers that ranks move."""
        self.deaf: set[int] = set()
        """Ranks that do not answer ``Stop``."""

    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(self.transport, f"rank{n}", n) for n in range(RANKS))

    def send(self, frame: f.TransferToRank) -> None:
        self.frames.append(frame)
        if isinstance(frame, f.StopTransfer):
            self.busy.discard(frame.key)
            for rank in set(self.ranks) - self.deaf:
                self.said.append(ev.RankStopped(frame.key, rank))
        else:
            self.busy.add(frame.offer.key)

    def say(self, key: TransferKey, outcome: Outcome, error: Any = None) -> None:
        for rank in self.ranks:
            self.said.append(ev.RankReport(key, rank, outcome, error))

    def take(self) -> list[RankEvent]:
        said = list(self.said)
        self.said.clear()
        return said


class FakeScheduler:
    """The blocks of one group, by transfer."""

    def __init__(self, refuse: str = "") -> None:
        self.free = list(range(1, BLOCKS))
        self.held: dict[TransferKey, list[int]] = {}
        self.requests: deque[r.TransferRequest] = deque()
        self.reported: list[r.TransferEvent] = []
        self.later: dict[TransferKey, None] = {}
        """Postponed transfers."""
        self.refuse = refuse

    def kinds(self, key: TransferKey) -> list[str]:
        return [type(event).__name__ for event in self.reported if event.key == key]

    def hold(self, key: TransferKey) -> tuple[r.Blocks, ...]:
        assert key not in self.held
        self.held[key] = [self.free.pop() for _ in range(3)]
        return self.transfer_blocks(key)

    def transfer_blocks(self, key: TransferKey) -> tuple[r.Blocks, ...]:
        return (blocks_of(self.held[key]),)

    def transfer_requests(self) -> list[r.TransferRequest]:
        while self.later and len(self.free) >= 3:
            key = next(iter(self.later))
            del self.later[key]
            self.requests.append(r.ReserveTransfer(key, 0, self.hold(key)))
        asked = list(self.requests)
        self.requests.clear()
        return asked

    def transfer(self, event: r.TransferEvent, now: float) -> list[TokenEvent]:
        self.reported.append(event)
        key = event.key
        match event:
            case r.TransferWanted():
                if self.refuse:
                    self.requests.append(r.RefuseTransfer(key, ERROR))
                elif key in self.held:
                    pass  # already answered
                elif len(self.free) < 3:
                    self.later[key] = None
                    self.requests.append(r.PostponeTransfer(key, 0.5))
                else:
                    self.requests.append(r.ReserveTransfer(key, 0, self.hold(key)))
            case r.TransferReceived() | r.TransferFreed():
                self.free += self.held.pop(key, [])
            case r.TransferFailed():
                self.later.pop(key, None)
                return [TokenEvent(sequence=key.transfer, finish="evicted")]
        return []


class FakePeers(PeerWatch):
    """A watch without processes: the test reports ends of processes."""

    def register(self, peer: Peer, process: PeerProcess) -> None:
        self._known.setdefault(peer, process)

    def end(self, peer: Peer) -> None:
        self._ended.append(peer)


class Side:
    """One engine."""

    def __init__(self, pair: Pair, role: Any, transport: str) -> None:
        self.pair = pair
        self.peer = Peer(f"ipc://{role}", 7 if role == "prefill" else 8)
        self.channel = FakeChannel(pair.net, self.peer, own_process())
        self.ranks = FakeRanks(transport)
        self.scheduler = FakeScheduler()
        self.peers = FakePeers()
        self.events: list[TokenEvent] = []
        self.alive = True
        self.transfers = EngineTransfers(
            role == "prefill",
            self.ranks,
            self.channel,
            incarnation=self.peer.incarnation,
            clock=pair.clock,
            patience=PATIENCE,
            peers=self.peers,
        )

    def turn(self) -> None:
        if self.alive:
            self.events += self.transfers.take(self.scheduler)
            held = [block for blocks in self.scheduler.held.values() for block in blocks]
            if len({*held, *self.scheduler.free}) != BLOCKS - 1 or len(held) != len(set(held)):
                raise Violation("a block is used twice, or lost")
            if not self.ranks.busy <= {*self.scheduler.held}:
                raise Violation("ranks move a room whose memory was given back")


class Pair:
    """A prefill group and a decode group."""

    def __init__(self, seed: int = 0, loss: float = 0.0, transport: str = "shm") -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock(1000.0)
        self.net = Net(self.clock, self.rng, loss)
        self.sender, self.receiver = Side(self, "prefill", transport), Side(self, "decode", transport)

    def key(self, transfer: int) -> TransferKey:
        return TransferKey(transfer, 0, self.sender.peer.incarnation)

    def open(self, transfer: int, seconds: float = 60.0) -> TransferKey:
        key = self.key(transfer)
        self.sender.transfers.open(TransferParameters(key, True, self.receiver.peer, seconds))
        self.receiver.transfers.open(TransferParameters(key, False, self.sender.peer, seconds))
        return key

    def admit(self, key: TransferKey) -> None:
        self.sender.scheduler.hold(key)
        self.sender.scheduler.requests.append(r.OfferTransfer(key, PROMPT, 0))

    def finish(self, key: TransferKey) -> None:
        self.sender.scheduler.requests.append(r.FinishTransfer(key, r.FirstToken(0, 5)))

    def run(self, seconds: float, step: float = 0.05) -> None:
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            for side in (self.sender, self.receiver):
                side.turn()
            self.clock.advance_to(self.clock.now() + step)

    def bound(self, transfer: int = 1) -> TransferKey:
        """Open a transfer, admit its sequence and run until the transfer is active. Return the key."""
        key = self.open(transfer)
        self.admit(key)
        self.run(0.3)
        assert self.sender.ranks.busy == {key} == self.receiver.ranks.busy
        return key
