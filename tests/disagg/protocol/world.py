"""Two engines, their ranks and the network between them on virtual time, with watched memory.

Blocks of sender and receiver have owners. Copies take time, so that anything may happen during a copy.
``World`` raises ``Violation`` as soon as a byte is written to memory that its transfer no longer owns.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tests.disagg.protocol.memory import KINDS, Group
from weft.common.errors import Unavailable
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.receiver import TransferReceiver
from weft.disagg.protocol.sender import TransferSender
from weft.disagg.protocol.transfer_table import FenceBy, TransferPatience
from weft.types import transfer as r
from weft.types.transfer import Outcome, Peer, State, TransferKey

RANKS, RANKS_TO, BLOCKS, PROMPT = 2, 2, 64, 10
LONGEST = 40.0
ERROR = Unavailable("planted").info()
GROUP = Group([KINDS["full"]], RANKS, 4, BLOCKS)
PATIENCE = TransferPatience(retry=0.5, bind=20.0, fence=3.0, remember=120.0)


class Violation(AssertionError):
    """An invariant was violated."""


class Memory:
    """Blocks of one group: the owner of each block, and its possible writers and readers."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.free = list(range(1, BLOCKS))
        self.tenant: dict[int, TransferKey] = {}
        self.of: dict[TransferKey, list[int]] = {}

    def take(self, key: TransferKey) -> list[int] | None:
        if len(self.free) < 3:
            return None
        self.of[key] = [self.free.pop(0) for _ in range(3)]
        self.tenant.update(dict.fromkeys(self.of[key], key))
        return self.of[key]

    def give_back(self, key: TransferKey) -> None:
        for block in self.of.pop(key, []):
            del self.tenant[block]
            self.free.append(block)

    def touch(self, key: TransferKey, blocks: list[int]) -> None:
        if any(self.tenant.get(block) != key for block in blocks):
            raise Violation(f"{self.what}: bytes of {key} touch memory that it no longer has")


class Engine:
    """The common part of both engines: state machine, process state, and events of the scheduler."""

    def __init__(self, world: World, name: str, incarnation: int) -> None:
        self.world, self.peer = world, Peer(name, incarnation)
        self.alive, self.paused_until = True, 0.0
        self.told: dict[TransferKey, list[str]] = {}
        self.opened: set[TransferKey] = set()
        self.memory = Memory(name)
        self.machine: Any = None
        self.quiet: set[TransferKey] = set()
        """Rooms of which no rank here moves anything any more."""

    def feed(self, event: Any) -> None:
        if not self.alive:
            return
        if self.paused_until > self.world.now:  # SIGSTOP: the event happens when the process continues
            self.world.at(self.paused_until - self.world.now + 1e-6, lambda: self.feed(event))
            return
        for action in self.machine.on(event, self.world.now):
            self.carry_out(action)
        self.arm()

    def arm(self) -> None:
        due = self.machine.next_due()
        if due is not None:
            self.world.at(max(0.0, due - self.world.now), self.tick)

    def tick(self) -> None:
        due = self.machine.next_due()
        if due is not None and due <= self.world.now:
            self.feed(ev.TransferTick())

    def carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.SendToPeer(peer, message):
                self.world.send(self, peer, message)
            case ev.StopRanks(key):
                self.world.stop(self, key)
            case ev.TellScheduler(event):
                self.note(event.key, type(event).__name__)
                self.tell(event)
            case ev.Revoke(key, peer):
                self.world.revoke(self, key, peer)
            case _:
                self.start(action)

    def note(self, key: TransferKey, what: str) -> None:
        said = self.told.setdefault(key, [])
        said.append(what)
        for once in ("TransferReceived", "TransferFailed", "TransferBound"):
            if said.count(once) > 1:
                raise Violation(f"{self.peer.name}: {once} twice for {key}: {said}")
        if "TransferReceived" in said and "TransferFailed" in said:
            raise Violation(f"{self.peer.name}: {key} has landed and failed: {said}")
        if what == "TransferFreed" and said.count(what) > 1 + ("reserved late" in said):
            raise Violation(f"{self.peer.name}: freed twice: {key}: {said}")

    def tell(self, event: r.TransferEvent) -> None:
        if isinstance(event, r.TransferFreed | r.TransferReceived):
            self.memory.give_back(event.key)

    def start(self, action: ev.Action) -> None:
        raise NotImplementedError


class Sender(Engine):
    def __init__(self, world: World, incarnation: int) -> None:
        super().__init__(world, "P", incarnation)
        self.machine = TransferSender(RANKS, world.fence, PATIENCE)
        self.receivers: dict[TransferKey, Peer] = {}

    def open(self, key: TransferKey, seconds: float) -> None:
        if not self.alive or key in self.opened:
            return
        self.opened.add(key)
        self.receivers[key] = self.world.receiver.peer
        self.feed(ev.Open(key, self.world.receiver.peer, seconds))
        self.world.at(self.world.rng.random() * 3, lambda: self.admit(key))

    def admit(self, key: TransferKey) -> None:
        """The scheduler admits the sequence, as soon as there are blocks."""
        if self.alive and self.paused_until > self.world.now:
            self.world.at(self.paused_until - self.world.now + 2e-6, lambda: self.admit(key))
            return
        if not self.alive or self.machine.state(key) is not State.new:
            return
        if self.memory.take(key) is None:
            self.world.at(0.5, lambda: self.admit(key))
            return
        self.feed(ev.Offer(r.Admitted(key=key, num_prompt=PROMPT, dims=GROUP.dims)))
        finished = ev.Finished(r.Metadata(key=key, first=(r.FirstToken(0, 7),)))
        self.world.at(self.world.rng.random() * 4, lambda: self.feed(finished))

    def start(self, action: ev.Action) -> None:
        assert isinstance(action, ev.Push)
        for rank in range(RANKS):
            self.world.push(self, rank, action)


class Receiver(Engine):
    def __init__(self, world: World, incarnation: int) -> None:
        super().__init__(world, "D", incarnation)
        self.machine = TransferReceiver(GROUP.dims, world.fence, PATIENCE)
        self.got: dict[tuple[TransferKey, int], set[int]] = {}

    def open(self, key: TransferKey, seconds: float) -> None:
        if self.alive and key not in self.opened:
            self.opened.add(key)
            self.feed(ev.Open(key, self.world.sender.peer, seconds))

    def tell(self, event: r.TransferEvent) -> None:
        super().tell(event)
        if isinstance(event, r.TransferWanted):
            self.world.at(self.world.rng.random() * 0.5, lambda: self.decide(event.key))

    def decide(self, key: TransferKey) -> None:
        """The scheduler's answer."""
        if not self.alive or key in self.memory.of:
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until - self.world.now + 1e-6, lambda: self.decide(key))
            return
        draw = self.world.rng.random()
        if "TransferFailed" in self.told[key]:
            draw = 0.5
        blocks = self.memory.take(key) if draw > 0.2 else None
        if draw < 0.03:
            self.feed(ev.Refuse(key, ERROR))
        elif blocks is None:
            self.feed(ev.Postpone(key, self.world.rng.random() * 2))
            self.world.at(self.world.rng.random() * 2, lambda: self.look_again(key))
        else:
            endpoints = tuple(r.Endpoint("loopback", f"D{rank}", 0) for rank in range(RANKS_TO))
            bound = r.Bound(
                key=key, start=0, dims=GROUP.dims, blocks=(blocks_of(blocks),), endpoints=endpoints
            )
            if "TransferFailed" in self.told[key]:
                self.told[key].append("reserved late")
            self.feed(ev.Reserve(bound))

    def look_again(self, key: TransferKey) -> None:
        """Answer a postponed transfer, unless the scheduler has answered already."""
        if key not in self.memory.of and "TransferFailed" not in self.told[key]:
            self.decide(key)

    def start(self, action: ev.Action) -> None:
        assert isinstance(action, ev.Expect)
        for rank in range(RANKS_TO):
            self.got[action.key, rank] = set()


class Write(NamedTuple):
    """One write from a rank of a sender to a rank of a receiver."""

    sender: Sender
    receiver: Receiver
    rank: int
    to: int
    key: TransferKey
    own: list[int]
    blocks: list[int]
    fails: bool


class World:
    """The simulation. ``fence``: the kind of transport. ``harm``: amount of faults, 0 to 1."""

    def __init__(self, seed: int, fence: FenceBy = "copy", harm: float = 1.0) -> None:
        self.rng, self.fence, self.harm = random.Random(seed), fence, harm
        self.now, self._count = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.sender, self.receiver = Sender(self, 1), Receiver(self, 2)
        self.past: list[Engine] = []
        self.late: list[TransferKey] = []
        self.cut: set[TransferKey] = set()
        """Transfers whose one-sided writes have no effect any more."""
        self.happened: set[str] = set()

    def at(self, delay: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, do))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self._queue)
            do()
        self.now = until

    def engine(self, peer: Peer) -> Engine | None:
        return next(
            (engine for engine in (self.sender, self.receiver) if engine.peer == peer and engine.alive), None
        )

    # ---- the network

    def send(self, source: Engine, peer: Peer, message: r.TransferMessage) -> None:
        data = r.encode(message)
        if self.rng.random() < 0.15 * self.harm:
            self.happened.add("lost")
            return
        copies = 1 + (self.rng.random() < 0.15 * self.harm)
        for _ in range(copies):
            delay = self.rng.random() * (0.2 if self.rng.random() > 0.1 * self.harm else 15.0)
            self.at(delay, lambda: self.deliver(source.peer, peer, data))

    def deliver(self, source: Peer, peer: Peer, data: bytes) -> None:
        engine = self.engine(peer)
        if engine is not None:
            engine.feed(ev.PeerMessage(source, r.decode(data)))

    # ---- ranks

    def push(self, sender: Sender, rank: int, action: ev.Push) -> None:
        """A rank writes to each rank of the receiver, each after a while."""
        key = action.key
        blocks = [int(b) for b in memoryview(action.bound.blocks[0].ids).cast("i")]
        own = sender.memory.of[key]
        receiver = self.engine(sender.machine._transfers[key].peer)
        if not isinstance(receiver, Receiver):
            return
        for to in range(RANKS_TO):
            delay = self.rng.random() * (3.0 if self.rng.random() > 0.1 * self.harm else 30.0)
            fails = self.rng.random() < 0.03 * self.harm
            write = Write(sender, receiver, rank, to, key, own, blocks, fails)
            self.at(delay, partial(self.land, write))

    def land(self, write: Write) -> None:
        """Complete one write. A copy needs the receiver's thread; a one-sided write needs no thread."""
        sender, receiver, rank, to, key, own, blocks, fails = write
        if self.fence == "copy":
            if not receiver.alive:
                return
            if receiver.paused_until > self.now:
                # A stopped receiver copies nothing: the write completes after the process continues.
                delay = receiver.paused_until - self.now + 1e-6
                self.at(delay, partial(self.land, write))
                return
            if key in receiver.quiet or (key, to) not in receiver.got:
                return
            if sender.alive:
                sender.memory.touch(key, own)
        else:
            if key in sender.quiet or key in self.cut or not sender.alive:
                return
            if sender.paused_until > self.now:
                delay = sender.paused_until - self.now + 1e-6
                self.at(delay, partial(self.land, write))
                return
        if not receiver.alive:
            return
        receiver.memory.touch(key, blocks)
        if fails:
            self.happened.add("a rank failed")
            receiver.feed(ev.RankReport(key, to, Outcome.failed, ERROR))
            return
        got = receiver.got.setdefault((key, to), set())
        got.add(rank)
        outcome = Outcome.done if len(got) == RANKS else Outcome.pending
        for _ in range(1 + (self.rng.random() < 0.2)):
            delay = self.rng.random() * 0.3
            self.at(delay, lambda: receiver.feed(ev.RankReport(key, to, outcome)))

    def stop(self, engine: Engine, key: TransferKey) -> None:
        """Stop the ranks, each after a random time of further work."""
        count = RANKS if engine is self.sender else RANKS_TO
        left = set(range(count))

        def stopped(rank: int) -> None:
            left.discard(rank)
            if not left:
                engine.quiet.add(key)
            engine.feed(ev.RankStopped(key, rank))

        for rank in range(count):
            self.at(self.rng.random(), lambda rank=rank: stopped(rank))  # type: ignore[misc]

    # ---- faults

    def revoke(self, engine: Engine, key: TransferKey, peer: Peer) -> None:
        """End the peer's process, or take its access away."""
        self.happened.add("revoked")
        other = self.engine(peer)
        if self.rng.random() < 0.5 or other is None:
            self.cut.add(key)
            if isinstance(engine, Sender):
                self.receiver.quiet.add(key)
            self.at(0.1, lambda: engine.feed(ev.Revoked(key)))
        else:
            self.kill(other)

    def kill(self, engine: Engine) -> None:
        if not engine.alive:
            return
        self.happened.add("killed")
        engine.alive = False
        self.past.append(engine)
        if engine is self.sender:
            self.sender = Sender(self, self._count + 10)
            others: list[Engine] = [self.receiver]
        else:
            self.receiver = Receiver(self, self._count + 10)
            others = [self.sender]
        for other in others:
            self.at(self.rng.random() * 2, partial(other.feed, ev.PeerLost(engine.peer)))

    def pause(self, engine: Engine, seconds: float) -> None:
        self.happened.add("paused")
        engine.paused_until = max(engine.paused_until, self.now + seconds)
