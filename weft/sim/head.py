"""A simulated head: the real ``HeadProtocol`` over the real ``Scheduler``, in a process of virtual time.

Its group (``weft.sim.group``) has one rank or several. A step goes out at ``Engine._launch``, to all ranks,
and its result is committed when the group's ``Membership`` says that it counts; ``lose_group`` and
``regroup`` are the loss of an epoch and the beginning of the next one (``weft.sim.head_engine``).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from weft.common.errors import EngineDead, WeftError
from weft.common.restarts import RestartBudget
from weft.config.sections import TransferSection
from weft.engine.group_rooms import GroupRooms
from weft.engine.room_channel import Arrived
from weft.engine.rooms import HeadRooms
from weft.group.meeting import Meeting
from weft.routing.head_protocol import HeadProtocol, Outgoing
from weft.sim.check import TokenModel, Violation, require
from weft.sim.group import Group
from weft.sim.head_engine import Engine
from weft.sim.idle import check_reservations
from weft.sim.network import Link
from weft.sim.ranks import Replica
from weft.sim.room_network import SimChannel, SimPeers
from weft.sim.sides import CACHES
from weft.transfer.room_table import Patience
from weft.types import messages as m
from weft.types.frames import Cache
from weft.types.rooms import Endpoint, Peer

if TYPE_CHECKING:
    from weft.sim.cluster import Cluster

HEARTBEAT_S = 1.0
ROOMS = Patience(retry=0.15, bind=2.0, fence=0.5, stop=0.4, longest=0.6, remember=60.0)
"""Everything is over sooner than one with the product's patience."""


class OldHeadProtocol(HeadProtocol):
    """The protocol of a head that speaks version 1 and nothing else."""

    def on(self, front: bytes, message: m.ToHead) -> Outgoing:
        if isinstance(message, m.Goodbye) or (isinstance(message, m.Submit) and message.attempt):
            raise Violation(f"a head of version 1 got {type(message).__name__} of version 2")
        if not isinstance(message, m.Hello):
            return super().on(front, message)
        require(message.versions[0] <= 1, "a front that speaks version 1 no more")
        answers = super().on(front, msgspec.structs.replace(message, versions=(1, 1)))
        return [
            (
                to,
                msgspec.structs.replace(answer, versions=(1, 1)) if isinstance(answer, m.Welcome) else answer,
            )
            for to, answer in answers
        ]


class HeadProcess:
    """A process: it listens, loads, serves, and ends. The loop is that of ``weft.engine.engine_server``:
    between steps it takes what came, and while it waits for a step it takes nothing.
    """

    def __init__(self, cluster: Cluster, instance: str, number: int, version: int) -> None:
        self.cluster = cluster
        self.instance = instance
        self.version = version
        self.name = f"{instance}#{number}"
        self.alive = True
        self.stalled_until = 0.0
        self.listens = False
        self.ready = False
        self.replaced = False
        """Whether another one takes its place, or none."""
        self.slow = False
        """Whether it will not start in time."""
        self.incarnation = cluster.rng.getrandbits(32)
        cluster.rooms.heads[self.incarnation] = self
        self.replica: Replica = cluster.replicas[instance]
        self.domain_gone = False
        """Whether another head of its domain ended while it lived."""
        self._load_s = 0.0
        self.number: int = number
        """Of all heads that were ever started."""
        self.watched_by: list[tuple[SimPeers, Peer]] = []
        """Heads of other groups that notice its end, and as whom they know it."""
        self._news = False
        """Whether it is to look at what came of rooms."""
        self._due: float | None = None
        """When it will look at deadlines of rooms."""
        model = TokenModel(cluster.row_errors, cluster.poison)
        rooms = cluster.rooms
        transfer = TransferSection(
            role=rooms.roles[instance], decode_watermark=rooms.watermark, transfer_mode=rooms.mode
        )
        caches = cluster.rooms.caches(instance)
        section = cluster.rooms.images.section(cluster.section, transfer.role)
        self.engine = Engine(caches, section, model, cluster.clock, transfer)
        kind = HeadProtocol if version > 1 else OldHeadProtocol
        self.protocol = kind(self.engine, self.incarnation)
        self.links: dict[bytes, Link] = {}
        """Connection -> its link."""
        self.connecting: list[Link] = []
        """Links that wait for it to listen."""
        self._inbox: deque[tuple[bytes, m.ToHead]] = deque()
        self._waits = 0
        """Number of the step waited for, if ``_busy``; a new one for every wait."""
        self._busy = False
        self._heartbeat_due = False

    # -- start and end

    def start(self, listen: float, load: float) -> None:
        """Starts the process: it will listen after ``listen`` seconds, and serve ``load`` seconds later."""
        self._load_s = load
        self.cluster.at(self.cluster.now + listen, self, self._listen)

    @property
    def group(self) -> Group:
        """Once it listens."""
        assert self.engine.group is not None
        return self.engine.group

    @property
    def excused(self) -> bool:
        """Whether something happened to it, or to its ranks, for which it may not start in time."""
        group = self.engine.group
        troubled = group is not None and group.troubled
        return self.slow or not self.alive or (not self.ready and (troubled or self.domain_gone))

    def _listen(self) -> None:
        cluster = self.cluster
        self.listens = True
        for link in self.connecting:
            cluster.connect(link)
        self.connecting.clear()
        domain = cluster.instances[self.instance]
        meeting = None
        if domain:
            number = list(cluster.instances).index(self.instance)
            meeting = Meeting(number, f"store{self.name}", "", self.name)
        self.engine.group = Group(
            self,
            self.replica,
            self.name,
            load=self._load_s,
            meeting=meeting,
            leases=cluster.leases,
            budget=RestartBudget(cluster.rank_budget, 600.0),
            lag=cluster.lag,
        )
        self.engine.group.start()

    def _serve(self) -> None:
        self.ready = True
        self._open_rooms()
        self.cluster.at(self.cluster.now + HEARTBEAT_S, self, self._timer)
        self._turn()

    def fail(self, error: EngineDead) -> None:
        """The engine raised: every front hears of it, then the process ends."""
        self._send(self.protocol.failed(error))
        self.close_rooms()
        self.cluster.end_head(self, lingers=True)

    # -- rooms

    def _open_rooms(self) -> None:
        """See ``weft.engine.room_start`` and ``rank_rooms``."""
        rooms = self.cluster.rooms
        if rooms.moves(self.instance):
            self.engine.sides = rooms.make_sides(self.replica, self)
            for cache in CACHES:
                self._open(cache)

    def _open(self, cache: Cache) -> None:
        cluster, role, group, sides = self.cluster, self.engine.transfer.role, self.group, self.engine.sides
        side = None if sides is None else sides.of(cache)
        if side is None:
            return
        own, members = side.endpoint, group.membership.members
        numbers = {rank: number for number, rank in enumerate(sorted(members), 1)}

        def endpoints() -> list[Endpoint | None]:
            others = (members[rank] for rank in numbers)
            return [own, *(one.endpoint if cache == "kv" else one.embeddings for one in others)]

        group.rooms[cache] = GroupRooms(side, side, endpoints, numbers, group.send_room, cache=cache)
        self.engine.rooms[cache] = HeadRooms(
            role == ("prefill" if cache == "kv" else "encode"),
            group.rooms[cache],
            SimChannel(cluster.rooms.network, self, cache),
            incarnation=self.incarnation,
            clock=cluster.clock,
            patience=ROOMS,
            peers=SimPeers(cluster.rooms.network, self),
        )

    def room_message(self, channel: SimChannel, arrived: Arrived) -> None:
        """A head of another group says something."""
        channel.came.append(arrived)
        self.room_news()

    def room_news(self) -> None:
        """There is something to hear of rooms. A loop that waits for a step looks when that is done."""
        if not self._news:
            self._news = True
            self.cluster.at(self.cluster.now, self, self._look)

    def _look(self) -> None:
        self._news = False
        if self.ready and not self._busy:
            self._turn()

    def _watch_rooms(self) -> None:
        """Looks again when something of rooms is due."""
        each = [rooms.next_due for rooms in self.engine.rooms.values()]
        due = min((one for one in each if one is not None), default=None)
        if due is not None and (self._due is None or due < self._due):
            self._due = due
            self.cluster.at(max(due, self.cluster.now), self, self._rooms_due, due)

    def _rooms_due(self, due: float) -> None:
        if due == self._due:
            self._due = None
            self.room_news()

    def close_rooms(self) -> None:
        """Closes its rooms, as it ends in order: peers are told."""
        for rooms in self.engine.rooms.values():
            rooms.close()

    # -- what comes

    def receive(self, link: Link, message: m.ToHead) -> None:
        """A message arrived."""
        self._inbox.append((link.connection, message))
        if self.ready and not self._busy:
            self._turn()

    def forget(self, link: Link) -> None:
        """The connection is gone, as it notices now."""
        self.links.pop(link.connection, None)
        self.protocol.forget(link.connection)
        self.check()
        if self.ready and not self._busy:
            self._turn()

    # -- the loop

    def _turn(self, worked: bool = False) -> None:
        """``worked``: whether it was busy until now. Fronts hear at once that all is done."""
        cluster = self.cluster
        worked = worked or self.engine.has_work()
        while self.alive:
            while self._inbox:
                self._send(self.protocol.on(*self._inbox.popleft()))
            self._tell(self.engine.hear())
            self.check()
            self._watch_rooms()
            if self.protocol.stopped:
                cluster.stopped(self)
                return
            if self.engine.recovering or not self.group.running:
                return
            if not self.engine.has_work():
                if self.protocol.draining and not self.protocol.live and not self.engine.transferring:
                    cluster.supervisor.drained(self)
                break
            try:
                step = self.engine.launch(cluster.now)
            except EngineDead as error:
                raise Violation(f"{self.name}: the engine failed by itself: {error.message}") from error
            if not self.engine.scheduler.in_flight and self.engine.has_work():
                raise Violation(f"{self.name}: work waits and nothing is planned")
            self._tell(self.engine.asked())  # what ended in the making of the step may let others go on
            if step is not None:
                self._busy = True
                self._waits += 1
                if self.group.others:
                    self.group.wait_for(step.plan.step)
                else:
                    cluster.at(max(step.complete, cluster.now), self, self._complete, self._waits)
                return
        if worked or self._heartbeat_due:
            self._heartbeat()

    def _complete(self, number: int) -> None:
        """The step waited for is complete."""
        if number != self._waits or not self._busy:
            return
        self._busy = False
        try:
            events = self.engine.commit_oldest(self.cluster.now)
        except EngineDead as error:
            raise Violation(f"{self.name}: the engine failed by itself: {error.message}") from error
        if events is None:
            self.cluster.poisoned(self)
            return
        self._send(self.protocol.events(events, self.engine.scheduler.steps))
        if self._heartbeat_due:
            self._heartbeat()
        self._turn(worked=True)

    def _tell(self, events: list[m.TokenEvent]) -> None:
        if events:
            self._send(self.protocol.events(events, self.engine.scheduler.steps))

    def _timer(self) -> None:
        self.cluster.at(self.cluster.now + HEARTBEAT_S, self, self._timer)
        if self._busy:
            self._heartbeat_due = True
        else:
            self._heartbeat()

    def _heartbeat(self) -> None:
        self._heartbeat_due = False
        self._send(self.protocol.heartbeats())

    def _send(self, outgoing: Outgoing) -> None:
        for connection, message in outgoing:
            link = self.links.get(connection)
            if link is not None:
                self.cluster.network.to_front(link, message)

    # -- what happens to it

    def group_lost(self) -> None:
        """See ``Owner``."""
        cluster = self.cluster
        self._busy = False
        lost = self.engine.lose_group()
        cluster.groups_lost += 1
        cluster.counts["steps lost with their ranks"] += lost
        cluster.note(self.name, "..", "", f"its epoch is lost, with {lost} steps")
        if self._heartbeat_due:
            self._heartbeat()
        self._turn()

    def group_runs(self) -> None:
        """See ``Owner``."""
        if not self.ready:
            self._serve()
        elif self.engine.recovering:
            self._send(self.protocol.events(self.engine.regroup()))
            if self.engine.held_over:
                self.cluster.count("blocks on hold over a loss", len(self.engine.held_over))
            self._turn(worked=True)

    def group_failed(self, error: WeftError) -> None:
        """See ``Owner``."""
        self.cluster.happened("group given up")
        if self.ready:
            self.fail(EngineDead(error.message))
        else:
            self.cluster.end_head(self)

    def step_counts(self) -> None:
        """See ``Owner``."""
        self.cluster.at(self.cluster.now, self, self._complete, self._waits)

    def hold(self, seconds: float) -> bool:
        """Blocks of a running sequence are on hold for so long. Whether there were any."""
        blocks = self.engine.hold(seconds, self.cluster.now)
        if blocks:
            self.cluster.note(self.name, "..", "", f"blocks {blocks} are on hold for {seconds:.3f} s")
            self.cluster.at(self.cluster.now + seconds, self, self._unhold, blocks)
        return bool(blocks)

    def _unhold(self, blocks: list[int]) -> None:
        self.engine.unhold(blocks)
        if self.ready and not self._busy:
            self._turn()

    def drain(self) -> None:
        """Has it take nothing new, and end when nothing is left."""
        self.protocol.draining = True
        if self.ready and not self._busy:
            self._turn()

    def evict(self, moving: bool = False) -> int | None:
        """Gives a sequence back to its front, if one that knows of it has any. Returns which. ``moving``: one
        whose room has not ended."""
        there = self.engine.live()
        for sequence, owner in self.protocol._owners.items():
            link = self.links.get(owner.front)
            if sequence not in there or (moving and not self.engine.moves(sequence)):
                continue
            if link is not None and link.version > 1:
                event = m.TokenEvent(sequence=sequence, finish="evicted")
                ended = [one for one in self.engine.finish(sequence) if one.sequence != sequence]
                self._send(self.protocol.events([event, *ended]))
                return sequence
        return None

    def check(self) -> None:
        """Raises Violation unless all that is live here belongs to a front, and all that belongs is live."""
        live = self.engine.live() | self.engine.given_back()
        owned = self.protocol._owners.keys()
        if live != owned:
            raise Violation(f"{self.name}: live {sorted(live)}, owned by fronts {sorted(owned)}")
        check_reservations(self)
