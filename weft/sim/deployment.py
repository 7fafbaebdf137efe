"""Several groups behind one front, on virtual time and without faults: how many of which role a load needs.

The front's ``Fleet``, each head's ``HeadProtocol`` and ``Scheduler`` are those that serve; a cost model
stands for the model and machine of each group, and a bandwidth for the transport between two of them. A
chunk of a prompt leaves when its step is done, behind what left before it; the sequence goes on where it is
decoded when all has arrived. Groups that encode images have the ``EncodeScheduler`` that serves; embeddings
leave over the same wires.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from weft.config.resolved import KVConfig
from weft.config.sections import SchedulerSection, TransferSection
from weft.encoder.scheduler import EncodeScheduler
from weft.kv.prefix_log import PrefixLog
from weft.routing import events as e
from weft.routing.fleet import Fleet
from weft.routing.head_protocol import HeadProtocol
from weft.routing.instance_table import Patience
from weft.scheduler import Scheduler
from weft.scheduler.step_cost import CostModel
from weft.sim.device import FakeDevice
from weft.sim.engine import VOCABULARY, depth_of
from weft.sim.images import ImageCosts, Images
from weft.sim.metrics import Latency, Stream, gaps, rate
from weft.sim.timeline import Timeline
from weft.sim.transfers import Part, TransferRooms, Wire
from weft.sim.workload import Arrival, Prompts, in_order
from weft.types import messages as m
from weft.types import rooms as r
from weft.types.frames import Cache
from weft.types.media import MediaItem
from weft.types.plan import Export, SendMedia, StepPlan
from weft.types.sampling import TokenParams

HEARTBEAT_S = 0.5
PATIENCE = Patience(engine=math.inf, recovery=math.inf, load=math.inf, listen=math.inf, role=math.inf)
MOST_PIXELS = 1 << 40
"""Bytes of pixels that a group that encodes has at a time: they cost nothing here."""
_FRONT = b"front"


class Groups(NamedTuple):
    """How many of each role."""

    unified: int = 0
    prefill: int = 0
    decode: int = 0
    encode: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{number} {role}" for number, role in self._roles() if number)

    def names(self) -> list[tuple[str, m.Role]]:
        """A name and a role for each."""
        return [(f"{role}{number}", role) for count, role in self._roles() for number in range(count)]

    def _roles(self) -> tuple[tuple[int, m.Role], ...]:
        return (
            (self.encode, "encode"),
            (self.unified, "unified"),
            (self.prefill, "prefill"),
            (self.decode, "decode"),
        )


class Outcome(NamedTuple):
    """What one run showed. Times in seconds."""

    groups: Groups
    requests: int
    done: int
    refused: int
    seconds: float
    ttft: Latency
    """Arrival to first token."""
    itl: Latency
    """Between two tokens of one request, all together."""
    tpot: Latency
    """Mean time between two tokens of one request, by request."""
    output_rate: float
    exposed: Latency
    """From the first token until all of the cache had arrived, of requests at two groups."""
    busy: dict[str, float]
    """Group -> part of the time that its device computed, 0 .. 1."""
    good: float
    """Share of the requests that met both limits, 0 .. 1."""


class Group:
    """A head, its scheduler and a device that only takes time; the engine behind its ``HeadProtocol``."""

    recovering = False

    def __init__(
        self,
        deployment: Deployment,
        name: str,
        role: m.Role,
        kv: KVConfig,
        section: SchedulerSection,
        cost: CostModel,
        noise: float,
        seed: int,
        images: ImageCosts | None = None,
    ) -> None:
        self.name = name
        self.role = role
        patch_seconds = 0.0 if images is None else images.patch_seconds
        self.device = FakeDevice(cost, VOCABULARY, noise, seed, patch_seconds=patch_seconds)
        self.incarnation = seed + 1
        self.link_free_at = 0.0
        """When all that has left is on its way."""
        self.scheduler: Scheduler | EncodeScheduler
        if role == "encode":
            assert kv.media is not None
            self.scheduler = EncodeScheduler(kv.media, section, MOST_PIXELS)
        else:
            self.scheduler = Scheduler(kv, section, VOCABULARY, None, TransferSection(role=role))
        self.protocol = HeadProtocol(self, self.incarnation)
        self._kv = kv
        self._section = section
        self._deployment = deployment
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()
        self._completed = 0.0

    # ---- the engine of its protocol

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        events = self.scheduler.add(submit, self._deployment.now)
        if submit.room is not None:
            self._deployment.rooms.open(submit.room, self)
        for item in submit.media:
            if item.room is not None:
                self._deployment.images.open(item.room, self)
        return events

    def part(self, cache: Cache) -> Part | None:
        """What of its scheduler has a part in rooms of ``cache``."""
        if cache == "embeddings":
            return self.scheduler.embeddings
        return None if self.role == "encode" else self.scheduler

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        return self.scheduler.finish(sequence)

    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work()

    def stats(self) -> m.HeadStats:
        return self.scheduler.stats()

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        return self.scheduler.follow_prefixes()

    def welcome(self, incarnation: int) -> m.Welcome:
        return m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=VOCABULARY,
            max_model_len=self._kv.max_model_len,
            max_num_seqs=self._section.max_num_seqs,
            num_blocks=tuple(pool.num_blocks for pool in self._kv.pools),
            incarnation=incarnation,
            block_size=self._kv.block_size,
            role=self.role,
            fingerprint="" if self.role in ("unified", "encode") else "one model",
            rooms="" if self.role in ("unified", "encode") else self.name,
            tower=self._kv.media is not None and self._kv.media.tower,
            embeddings="" if self.scheduler.embeddings is None else self.name,
            tower_fingerprint="" if self._kv.media is None else "one tower",
        )

    # ---- its loop

    def heard(self, events: list[m.TokenEvent]) -> None:
        """Its scheduler has heard of a room, and told ``events``."""
        self._deployment.tell(self, self.protocol.events(events))
        self.turn()

    def hear(self, message: m.ToHead) -> None:
        """The front has sent ``message``."""
        self._deployment.tell(self, self.protocol.on(_FRONT, message))
        self.turn()

    def turn(self) -> None:
        """Launches what can be launched now."""
        deployment = self._deployment
        now = deployment.now
        deployment.tell(self, self.protocol.events(self.scheduler.expire(now)))
        deployment.serve(self)
        depth = depth_of(self._section)
        while len(self._in_flight) < depth:
            builder = self.scheduler.build(now)
            if builder is None:
                return
            plan = self.scheduler.seal(builder)
            complete = self.device.launch(plan, now)
            self._in_flight.append((plan, now, complete))
            deployment.timeline.at(complete, None, self._commit)
            deployment.serve(self)

    def _commit(self) -> None:
        plan, began, _ = self._in_flight.popleft()
        deployment = self._deployment
        now = deployment.now
        events = self.scheduler.commit(plan, self.device.result(plan), now)
        self.scheduler.observe(plan, now - max(began, self._completed))
        self._completed = now
        for op in plan.ops:
            if isinstance(op, Export):
                deployment.rooms.send(op.key, op.start, op.end)
            elif isinstance(op, SendMedia):
                deployment.images.send(op.key, 0, op.count)
        deployment.tell(self, self.protocol.events(events, self.scheduler.steps))
        self.turn()


class Deployment:
    """One run: groups, a front, and requests. A seed determines it."""

    def __init__(
        self,
        groups: Groups,
        kv: KVConfig,
        section: SchedulerSection,
        cost: CostModel,
        arrivals: Sequence[Arrival],
        wire: Wire,
        *,
        seed: int = 0,
        noise: float = 0.0,
        shared: int = 0,
        images: ImageCosts | None = None,
    ) -> None:
        """``kv``, ``section``, ``cost``: of each group. ``shared``: leading tokens that all prompts share.
        ``images``: what those of the requests cost, if they have any.
        """
        self.timeline = Timeline(seed)
        self.streams: dict[int, Stream] = {}
        self.refused = 0
        self._arrivals = in_order(arrivals)
        self._prompts = Prompts(VOCABULARY, shared, seed)
        self._shared = shared
        self._images = None if images is None else Images(images, seed)
        self._groups = groups
        most = max((arrival.images for arrival in arrivals), default=0)
        self.groups = {
            name: Group(
                self,
                name,
                role,
                _sees(kv, role, groups, images, most),
                section,
                cost,
                noise,
                seed + n,
                images,
            )
            for n, (name, role) in enumerate(groups.names())
        }
        self.fleet = Fleet(dict.fromkeys(self.groups, ""), PATIENCE, front="front")
        dims = r.GroupDims(
            ranks=1,
            kinds=tuple(
                r.KindDims(
                    kind="full",
                    layers=(0,),
                    block_size=pool.block_size,
                    window=0,
                    ratio=1,
                    kv_heads=1,
                    tensors=(),
                )
                for pool in kv.pools
            ),
        )

        self.rooms = TransferRooms(self.timeline, wire, self.groups, dims)
        costs = images or ImageCosts(1, 0.0, 1)
        rows = wire._replace(position_bytes=costs.row_bytes)
        self.images = TransferRooms(self.timeline, rows, self.groups, costs.dims(), "embeddings")

    @property
    def now(self) -> float:
        """Seconds of virtual time."""
        return self.timeline.now

    def run(self, limits: tuple[float, float] = (math.inf, math.inf)) -> Outcome:
        """Runs until all requests have ended. ``limits``: of TTFT and of TPOT, in seconds."""
        for number, name in enumerate(self.groups, 1):
            self._feed(e.Expected(name, number))
            self._feed(e.Located(name, number))
            self._feed(e.Linked(name, number))
        for number, arrival in enumerate(self._arrivals):
            self.timeline.at(arrival.at, None, self._open, number, arrival)
        self.timeline.at(HEARTBEAT_S, None, self._heartbeat)
        while self._unfinished():
            self.timeline.advance()
        return self._outcome(limits)

    def serve(self, group: Group) -> None:
        """Carries out what the scheduler of ``group`` asks of its rooms."""
        self.rooms.serve(group)
        self.images.serve(group)

    def _unfinished(self) -> bool:
        ended = sum(stream.finish is not None for stream in self.streams.values())
        return ended + self.refused < len(self._arrivals)

    # ---- the front

    def _open(self, number: int, arrival: Arrival) -> None:
        self.streams[number] = Stream(arrival)
        media: tuple[MediaItem, ...] = ()
        if self._images is not None:
            media = self._images.items(arrival.images, min(self._shared, arrival.prompt))
        length = arrival.prompt + sum(item.count for item in media)
        submit = m.Submit(
            sequence=number,
            request=number,
            seed=number,
            prompt_ids=m.ids_to_bytes(self._prompts.make(length)),
            params=TokenParams(max_tokens=arrival.output),
            media=media,
        )
        self._feed(e.Opened((submit,)))

    def _feed(self, event: e.Event) -> None:
        for action in self.fleet.on(event, self.now):
            if isinstance(action, e.Send):
                self.timeline.at(self.now, None, self.groups[action.instance].hear, action.message)
            elif isinstance(action, e.Deliver):
                self._deliver(action.events)
            elif isinstance(action, e.Failed):
                raise action.error
        due = self.fleet.next_deadline()
        if due < math.inf:
            self.timeline.at(due, None, self._tick)

    def _tick(self) -> None:
        if self.fleet.next_deadline() <= self.now:
            self._feed(e.Tick())

    def _deliver(self, events: Sequence[m.TokenEvent]) -> None:
        for event in events:
            stream = self.streams[event.sequence]
            stream.times += [self.now] * len(event.token_ids)
            if event.finish == "error":
                self.refused += 1
                del self.streams[event.sequence]
            elif event.finish is not None:
                stream.finish = event.finish

    def tell(self, group: Group, outgoing: Sequence[tuple[bytes, m.ToFront]]) -> None:
        """What a head says to its front."""
        link = list(self.groups).index(group.name) + 1
        for _, message in outgoing:
            self.timeline.at(self.now, None, self._feed, e.Received(group.name, link, message))

    def _heartbeat(self) -> None:
        for group in self.groups.values():
            self.tell(group, group.protocol.heartbeats())
            group.turn()
        self.timeline.at(self.now + HEARTBEAT_S, None, self._heartbeat)

    # ---- what came of it

    def _outcome(self, limits: tuple[float, float]) -> Outcome:
        streams = list(self.streams.values())
        started = [stream for stream in streams if stream.times]
        waits = [stream.times[0] - stream.arrival.at for stream in started]
        paces = [_pace(stream) for stream in started]
        good = sum(wait <= limits[0] and pace <= limits[1] for wait, pace in zip(waits, paces, strict=True))
        now = max((stream.times[-1] for stream in started), default=0.0)
        return Outcome(
            groups=self._groups,
            requests=len(self._arrivals),
            done=sum(stream.done for stream in streams),
            refused=self.refused,
            seconds=now,
            ttft=Latency.of(waits),
            itl=Latency.of(gaps(streams)),
            tpot=Latency.of(paces),
            output_rate=rate(sum(len(stream.times) for stream in streams), now),
            exposed=Latency.of(self.rooms.exposed),
            busy={
                name: min(group.device.busy / now, 1.0) if now else 0.0 for name, group in self.groups.items()
            },
            good=good / len(self._arrivals) if self._arrivals else 0.0,
        )


def _sees(kv: KVConfig, role: m.Role, groups: Groups, images: ImageCosts | None, most: int) -> KVConfig:
    """What a group of ``role`` has: a tower where it encodes, or where it computes and none encodes."""
    if images is None:
        return kv
    computes = role in ("unified", "prefill")
    takes = computes and groups.encode > 0
    tower = role == "encode" or (computes and not takes)
    return msgspec.structs.replace(kv, media=images.limits(max(most, 1), tower=tower, takes=takes))


def _pace(stream: Stream) -> float:
    """Mean seconds between two tokens; 0 where there is one."""
    times = stream.times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
