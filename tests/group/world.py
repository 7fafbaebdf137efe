"""Virtual hosts, ranks and links around ``Membership``, on virtual time: what a simulator of control needs.

Everything that may happen is drawn from one seed. A ``World`` checks what must hold whenever
anything changes.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weft.common.errors import EngineDead
from weft.common.restarts import RestartBudget
from weft.group import types as t
from weft.group.liveness import COLLECTIVE
from weft.group.meeting import Meeting
from weft.group.membership import Membership
from weft.group.types import GroupLost
from weft.types import frames as f

TIMEOUT, HELLO, LOAD = 10.0, 20.0, 40.0
SETTINGS = {"dtype": '"float64"'}
FAILURE = EngineDead("planted").info()


@dataclass(eq=False)
class Process:
    """One process of a rank: says hello, loads, forms, takes steps, and fails as it is told to."""

    rank: int
    peer: bytes
    dead: bool = False
    stopped: bool = False
    welcomed: bool = False
    loaded: bool = False
    given_up: bool = False
    """Whether its head has replaced it."""
    epoch: int = -1
    running: bool = False
    connecting: int = -1
    did: dict[int, int] = field(default_factory=dict)
    """Step -> the epoch in which it ended here."""

    @property
    def active(self) -> bool:
        return not (self.dead or self.stopped)


class Head:
    """One head: its ``Membership``, the engine that steps, and the thread that carries out what blocks."""

    def __init__(self, world: World, replica: int, incarnation: int) -> None:
        self.world, self.replica, self.incarnation = world, replica, incarnation
        self.rank = replica * world.tensor
        self.ranks = [self.rank + 1 + n for n in range(world.tensor - 1)]
        name = f"{replica}.{incarnation}"
        meeting = Meeting(replica, f"store{name}", "", name) if world.replicas > 1 else None
        self.membership = Membership(
            self.rank,
            {rank: world.is_local(rank) for rank in self.ranks},
            settings=SETTINGS,
            rank_timeout=TIMEOUT,
            incarnation=name,
            stores=f"store{name}",
            meeting=meeting,
            budget=RestartBudget(1000, 1.0),
            hello_s=HELLO,
            load_s=LOAD,
        )
        self.gone = self.away = False
        self.epochs: list[int] = []
        self.step = self.flying = -1
        """The last step that was begun, and its epoch."""
        self.connecting: int | None = None
        self.carrying: deque[t.Action] = deque()
        self.busy = False
        self.resuming = False
        self.pools = False
        self.frames: deque[t.Event] = deque()
        """That nobody has read while this rank loads."""
        self.feed(t.Own("started"))
        self.poll()

    # ---- the shell

    def feed(self, event: t.Event) -> None:
        if self.gone:
            return
        before = self.membership.phase
        for action in self.membership.on(event, self.world.now):
            match action:
                case t.Send(peer, frame):
                    self.send(peer, frame, action.rank)
                case t.Abort():
                    self.world.abort(self.rank)
                case t.Renew(lease):
                    self.world.leases[self.replica] = lease
                case _:
                    self.carrying.append(action)
        self.world.check(self, before)
        self.carry()

    def send(self, peer: bytes, frame: f.ToRank, rank: int | None) -> None:
        process = self.world.processes.get(peer)
        if isinstance(frame, f.Refused) and process is not None:
            process.given_up = True
        if process is None or process.dead:
            if rank is not None:
                self.world.at(0.0, lambda: self.feed(t.Gone(rank, "it is not connected")))
        else:
            self.world.deliver(peer, lambda: self.world.take(self, process, frame))

    def carry(self) -> None:
        if self.busy or not self.carrying:
            return
        action, self.busy = self.carrying.popleft(), True
        world = self.world
        if isinstance(action, t.Connect):
            assert self.connecting is None, "two epochs are being formed at once"
            assert action.epoch > max([-1, *self.epochs]), "an epoch came again"
            self.epochs.append(action.epoch)
            self.connecting = action.epoch
            world.join(action.store, self.rank, self.connected)
            return

        def done() -> None:
            assert isinstance(action, t.Spawn)
            for process in world.processes.values() if action.anew else ():
                if process.rank == action.rank:
                    process.dead = process.given_up = True
            self.feed(t.Spawned(action.rank, world.spawn(action.rank)))
            self.busy = False
            self.carry()

        world.at(world.rng.uniform(0.0, 0.3), done)

    def connected(self, whole: bool) -> None:
        epoch, self.connecting, self.busy = self.connecting, None, False
        assert epoch is not None
        if self.world.rng.random() < 0.03 and self.world.faulty:
            self.feed(t.OwnFailure(epoch, "planted", collective=False))
        else:
            self.feed(t.Connected(epoch) if whole else t.OwnFailure(epoch, "no peer", collective=True))
        self.carry()

    def poll(self) -> None:
        """The loop of the thread that reads frames and steps."""
        if self.gone:
            return
        world, members = self.world, self.membership
        if not self.away:
            while self.frames:
                self.feed(self.frames.popleft())
            if members.leases_due(world.now):
                self.feed(t.LeasesRead(tuple(world.leases)))
            self.feed(t.Read())
            self.work()
        world.at(0.05, self.poll)

    def work(self) -> None:
        world, members = self.world, self.membership
        if not self.pools and members.welcomed and members.phase == "gathering":
            self.pools = self.away = True
            self.feed(t.Own("loading"))
            world.at(world.rng.uniform(0.1, 5.0), self.loaded)
        elif members.pools is not None and members._own.stage == "loaded" and members.phase != "ended":
            self.feed(t.Own("ready"))
        if members.phase == "lost" and members._stepping and not self.resuming:
            self.resuming = True
            world.at(world.rng.uniform(0.0, 0.3), self.resume)
        if members.phase != "running":
            return
        if self.flying != members.epoch:
            self.flying = members.epoch
        elif members.steps.own < self.step or not members.steps.settled(self.step):
            return
        else:
            world.settled(self)
        self.step += 1
        self.start_step()

    def loaded(self) -> None:
        self.away = False
        self.feed(t.Own("loaded", (8,)))

    def resume(self) -> None:
        self.resuming = False
        self.feed(t.Resume(self.membership.lost or GroupLost(None, "the domain is gone")))

    # ---- steps

    def start_step(self) -> None:
        world, step, epoch = self.world, self.step, self.membership.epoch
        for rank in self.ranks:
            peer = self.membership.members[rank].peer
            process = world.processes[peer]  # type: ignore[index]
            if process.dead:
                self.feed(t.Gone(rank, "it is not connected"))
                return
            world.deliver(peer, lambda p=process: world.take_step(self, p, epoch, step))  # type: ignore[misc]
        if self.membership.phase == "running":
            world.in_step.setdefault((self.replica, epoch, step), {})[self.rank] = self.own_step
            world.turn_step(self, epoch, step)

    def own_step(self, epoch: int, step: int, whole: bool) -> None:
        if self.world.faulty and self.world.rng.random() < 0.01:
            self.feed(t.OwnFailure(epoch, "planted", collective=False))
        elif whole:
            if self.membership.phase == "running" and self.membership.epoch == epoch:
                self.feed(t.OwnOutcome(step, step * 7))
        else:
            self.feed(t.OwnFailure(epoch, "a peer is gone", collective=True))


class World:
    """Everything outside the heads."""

    def __init__(self, seed: int, tensor: int = 3, replicas: int = 1, faults: float = 60.0) -> None:
        """``faults``: seconds in which anything may fail; from then on nothing does."""
        self.rng, self.tensor, self.replicas = random.Random(seed), tensor, replicas
        self.now, self.until = 0.0, faults
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.remote = {r for r in range(tensor * replicas) if self.rng.random() < 0.3}
        self.processes: dict[bytes, Process] = {}
        self.leases: list[t.Lease | None] = [None] * replicas
        self.stores: dict[str, dict[int, Callable[[bool], None]]] = {}
        self.in_step: dict[tuple[int, int, int], dict[int, Callable[[int, int, bool], None]]] = {}
        self._links: dict[bytes, float] = {}
        self.counted = {"faults": 0, "settled": 0, "epochs": 0, "heads": 0, "lost": 0}
        self.heads = [Head(self, replica, 0) for replica in range(replicas)]
        for rank in sorted(self.remote):
            self.spawn(rank)
        self.at(0.5, self.beat)
        self.at(1.0, self.befall)

    # ---- time and links

    @property
    def faulty(self) -> bool:
        return self.now < self.until

    def at(self, delay: float, work: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay, self._number, work))

    def run(self, until: float, ended: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until and not ended():
            self.now, _, work = heapq.heappop(self._queue)
            work()

    def deliver(self, link: bytes, work: Callable[[], None]) -> None:
        """In order, on each link; now and then late."""
        delay = self.rng.uniform(0.0, 0.02) if self.rng.random() < 0.98 else self.rng.uniform(0.0, 3.0)
        due = max(self.now + delay, self._links.get(link, 0.0))
        self._links[link] = due
        self.at(due - self.now, work)

    def to_head(self, head: Head, process: Process, frame: Any) -> None:
        if process.active:
            link = process.peer + b">%d" % head.incarnation
            self.deliver(
                link, lambda: None if head.gone else head.frames.append(t.Received(process.peer, frame))
            )

    # ---- processes

    def is_local(self, rank: int) -> bool:
        return rank not in self.remote

    def head_of(self, rank: int) -> Head:
        return self.heads[rank // self.tensor]

    def living(self, rank: int) -> Process | None:
        return next((p for p in self.processes.values() if p.rank == rank and not p.dead), None)

    def spawn(self, rank: int) -> bool:
        """Whether it ran already."""
        if self.living(rank) is not None:
            return True
        peer = b"%d.%d" % (rank, len(self.processes))
        process = self.processes[peer] = Process(rank, peer)
        self.at(self.rng.uniform(0.2, 2.0), lambda: self.hello(process))
        return False

    def hello(self, process: Process) -> None:
        """Again and again until it is welcome."""
        if process.dead or process.welcomed:
            return
        head = self.head_of(process.rank)
        hello = f.RankHello(
            version=f.VERSION,
            release="",
            rank=process.rank,
            pid=1,
            epoch=process.epoch,
            settings=SETTINGS,
        )
        self.to_head(head, process, hello)
        self.at(1.0, lambda: self.hello(process))

    def die(self, process: Process) -> None:
        process.dead, process.running = True, False
        self.break_steps(process.rank)
        if not self.is_local(process.rank):  # else its head sees it, and starts it again
            self.at(self.rng.uniform(0.2, 2.0), lambda: self.spawn(process.rank) and None)

    def beat(self) -> None:
        """Heartbeats, and what heads see of processes."""
        for head in self.heads:
            for rank in head.ranks:
                process = self.living(rank)
                if process is not None and process.active and process.welcomed:
                    epoch = process.epoch if process.running else -1
                    name = head.membership.heartbeat().incarnation
                    head.feed(
                        t.Received(b"", f.RankHeartbeat(rank=rank, epoch=epoch, step=0, incarnation=name))
                    )
                    if process.epoch <= head.membership.aborted and process.running:
                        self.leave(process)
                if process is None and self.is_local(rank):
                    head.feed(t.Gone(rank, "its process ended"))
            head.feed(t.Read(heartbeats=True))
        self.at(0.5, self.beat)

    def befall(self) -> None:
        """Something goes wrong."""
        if not self.faulty:
            return
        self.at(self.rng.expovariate(1 / 4.0), self.befall)
        self.counted["faults"] += 1
        kind = self.rng.choice(["die", "die", "stop", "raise", "head"])
        if kind == "head":
            self.behead(self.rng.choice(self.heads))
            return
        living = [p for p in self.processes.values() if p.active]
        if not living:
            return
        process = self.rng.choice(living)
        if kind == "die":
            self.die(process)
        elif kind == "stop":
            process.stopped = True
            if self.rng.random() < 0.5:
                self.at(self.rng.uniform(1.0, 15.0), lambda: setattr(process, "stopped", False))
            elif process.rank in self.remote:
                self.at(TIMEOUT, lambda: self.die(process))  # as its own host does
        elif process.running:
            self.fail(process, collective=False)

    def behead(self, head: Head) -> None:
        """A head dies, and another one follows: its ranks keep their weights and say hello to it."""
        self.counted["heads"] += 1
        head.gone = True
        self.abort(head.rank)
        new = self.heads[head.replica] = Head(self, head.replica, head.incarnation + 1)
        for rank in new.ranks:
            process = self.living(rank)
            if process is None:
                continue
            if process.given_up:  # it was told, or will be by nobody
                process.dead = True
                continue
            self.leave(process)
            del self.processes[process.peer]
            process.peer = b"%d.%d" % (rank, 10_000 + self.counted["heads"])
            self.processes[process.peer] = process
            process.welcomed = False
            self.at(self.rng.uniform(0.5, 6.0), lambda p=process: self.hello(p))  # type: ignore[misc]

    def fail(self, process: Process, collective: bool) -> None:
        if not process.active or process.epoch < 0:
            return
        frame = f.Failed(rank=process.rank, epoch=process.epoch, step=0, error=FAILURE, comm=collective)
        self.leave(process)
        self.to_head(self.head_of(process.rank), process, frame)

    def leave(self, process: Process) -> None:
        process.running = False
        self.abort(process.rank)

    def take(self, head: Head, process: Process, frame: f.ToRank) -> None:
        """A rank gets a frame of its head; one that is stopped reads it when it goes on."""
        if process.dead or head.gone:
            return
        if process.stopped:
            self.at(0.5, lambda: self.take(head, process, frame))
            return
        match frame:
            case f.RankWelcome():
                if process.welcomed:
                    return
                process.welcomed = True
                if process.loaded:
                    self.to_head(head, process, f.Loaded(rank=process.rank, blocks=(8,)))
                    self.to_head(head, process, f.Ready(rank=process.rank))
                else:
                    self.at(self.rng.uniform(0.1, 5.0), lambda: self.loaded(head, process))
            case f.Refused() | f.Shutdown():
                self.die(process)
            case f.Pools():
                process.loaded = True
                self.to_head(head, process, f.Ready(rank=process.rank))
            case f.Abort(epoch=epoch):
                if epoch >= process.epoch:
                    self.leave(process)
            case f.Form(epoch=epoch, store=store):
                if epoch > process.epoch:
                    process.epoch, process.running = epoch, True
                    self.join(store, process.rank, lambda whole: self.formed(head, process, epoch, whole))

    def loaded(self, head: Head, process: Process) -> None:
        if process.dead or process.stopped:
            self.at(0.5, lambda: None if process.dead else self.loaded(head, process))
        elif self.faulty and self.rng.random() < 0.05:
            error = FAILURE
            self.to_head(head, process, f.Failed(rank=process.rank, epoch=-1, step=-1, error=error))
            self.die(process)
        elif not head.gone:
            self.to_head(head, process, f.Loaded(rank=process.rank, blocks=(8,)))
        else:  # its head is gone while it loaded: the next one takes it as it is
            process.loaded = True

    def formed(self, head: Head, process: Process, epoch: int, whole: bool) -> None:
        if process.epoch != epoch or not process.running or not process.active or head.gone:
            return
        if whole:
            self.to_head(head, process, f.Formed(rank=process.rank, epoch=epoch))
        else:
            self.fail(process, collective=True)

    # ---- collectives

    def members_of(self, rank: int) -> int:
        return self.tensor * self.replicas if self.replicas > 1 else self.tensor

    def join(self, store: str, rank: int, then: Callable[[bool], None]) -> None:
        """``then`` is called when all have come, or with False after the patience of a collective."""
        here = self.stores.setdefault(store, {})
        assert rank not in here, "a store was used twice"
        ended: list[None] = []

        def once(whole: bool) -> None:
            if not ended:
                ended.append(None)
                then(whole)

        here[rank] = once
        self.at(COLLECTIVE * TIMEOUT, lambda: once(False))
        if len(here) == self.members_of(rank):
            for one in here.values():
                self.at(self.rng.uniform(0.0, 0.1), lambda o=one: o(True))  # type: ignore[misc]

    def take_step(self, head: Head, process: Process, epoch: int, step: int) -> None:
        if process.epoch != epoch or not process.running or process.dead:
            return
        if process.stopped:
            self.at(0.5, lambda: self.take_step(head, process, epoch, step))
            return

        def ended(epoch: int, step: int, whole: bool) -> None:
            if process.epoch != epoch or not process.running or not process.active:
                return
            if whole:
                process.did[step] = epoch
                done = f.Outcome(rank=process.rank, epoch=epoch, step=step, checksum=step * 7)
                self.to_head(head, process, done)
            else:
                self.fail(process, collective=True)

        self.in_step.setdefault((head.replica, epoch, step), {})[process.rank] = ended
        self.turn_step(head, epoch, step)

    def turn_step(self, head: Head, epoch: int, step: int) -> None:
        """A step of a replica ends when all of its ranks are in it."""
        here = self.in_step[head.replica, epoch, step]
        if len(here) == self.tensor:
            del self.in_step[head.replica, epoch, step]
            for one in here.values():
                self.at(self.rng.uniform(0.01, 0.1), lambda o=one: o(epoch, step, True))  # type: ignore[misc]
        elif len(here) == 1:
            self.at(COLLECTIVE * TIMEOUT, lambda: self.break_step((head.replica, epoch, step)))

    def break_step(self, key: tuple[int, int, int]) -> None:
        for one in self.in_step.pop(key, {}).values():
            one(key[1], key[2], False)

    def break_steps(self, rank: int) -> None:
        for key in [key for key, here in self.in_step.items() if rank in here]:
            self.at(self.rng.uniform(0.0, 0.2), lambda k=key: self.break_step(k))  # type: ignore[misc]

    def abort(self, rank: int) -> None:
        """A rank's communicators end: whoever is in a collective with it hears so."""
        self.break_steps(rank)

    # ---- what must hold

    def check(self, head: Head, before: str) -> None:
        members = head.membership
        if members.phase == "lost" and before != "lost":
            self.counted["lost"] += 1
        assert (members.failed is None) == (members.phase != "ended")
        if members.phase != "running":
            return
        assert members.epoch > members.aborted, "an epoch runs that was ended"
        for member in members.members.values():
            assert member.formed
            assert member.ready
        if before == "running":
            return
        self.counted["epochs"] += 1
        for rank, member in members.members.items():
            process = self.processes[member.peer]  # type: ignore[index]
            assert process.rank == rank
            assert not process.given_up, "a rank that was given up is in an epoch"
            assert process.epoch == members.epoch, "ranks are in two epochs"

    def settled(self, head: Head) -> None:
        """The head takes its last step for done."""
        self.counted["settled"] += 1
        for rank in head.ranks:
            process = self.processes[head.membership.members[rank].peer]  # type: ignore[index]
            assert process.did.get(head.step) == head.membership.epoch, "a rank has not ended the step"
