"""Several groups behind one API server, on virtual time and without faults.

The simulation shows how many groups of each role a load needs. The API server's ``Fleet`` and each engine's
``EngineProtocol`` and ``Scheduler`` are the product's code. A cost model replaces the model and machine of
each group. A bandwidth replaces the transport between two groups. A chunk of a prompt is sent at the end of
its step, after earlier chunks. The decode group continues after the whole cache has arrived. Encode groups
run the product's ``EncodeScheduler``. Embeddings use the same wires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection, TransferSection
from weft.control.fleet import fleet_events as e
from weft.control.fleet.engine_protocol import EngineProtocol
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instance_table import Patience
from weft.engine.loop import EngineLoop
from weft.scheduler import Scheduler
from weft.scheduler.encode.encode_scheduler import EncodeScheduler
from weft.scheduler.policy.step_cost import CostModel
from weft.sim.device import FakeDevice, FakeRanks, FakeStep
from weft.sim.engine import VOCABULARY, depth_of
from weft.sim.images import ImageCosts, Images
from weft.sim.latency_report import Latency, Stream, gaps, rate
from weft.sim.simulated_transfers import SchedulerPart, SimulatedTransfers, Wire
from weft.sim.timeline import Timeline
from weft.sim.workload import Arrival, Prompts, in_order
from weft.types import messages as m
from weft.types import transfer as r
from weft.types.frames import Cache
from weft.types.media_item import MediaItem
from weft.types.plan import Export, SendMedia, StepPlan
from weft.types.sampling import TokenParams

HEARTBEAT_S = 0.5
PATIENCE = Patience(engine=math.inf, recovery=math.inf, load=math.inf, listen=math.inf, role=math.inf)
MOST_PIXELS = 1 << 40
"""Maximum bytes of pixels in an encode group: practically unlimited."""
_FRONT = b"front"


class Groups(NamedTuple):
    """Number of groups of each role."""

    unified: int = 0
    prefill: int = 0
    decode: int = 0
    encode: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{number} {role}" for number, role in self._roles() if number)

    def names(self) -> list[tuple[str, m.Role]]:
        """Return a name and a role for each group."""
        return [(f"{role}{number}", role) for count, role in self._roles() for number in range(count)]

    def _roles(self) -> tuple[tuple[int, m.Role], ...]:
        """Return (number of groups, role) for each role, in the order of names."""
        return (
            (self.encode, "encode"),
            (self.unified, "unified"),
            (self.prefill, "prefill"),
            (self.decode, "decode"),
        )


class SimulatedOutcome(NamedTuple):
    """Results of one run. Times in seconds."""

    groups: Groups
    requests: int
    done: int
    refused: int
    seconds: float
    ttft: Latency
    """Arrival to first token."""
    itl: Latency
    """Times between two tokens of one request, over all requests."""
    tpot: Latency
    """Mean time between two tokens of one request, over requests."""
    output_rate: float
    exposed: Latency
    """First token until arrival of the whole cache, for requests at two groups."""
    busy: dict[str, float]
    """Group -> share of time in which the device computed, 0 .. 1."""
    good: float
    """Share of the requests within both limits, 0 .. 1."""


class Group(EngineLoop[FakeStep]):
    """The engine of one group, with a device that only takes time. Implements the ``EngineInterface`` of its
    protocol."""

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
        """``name``: name of the instance. ``cost``, ``noise``, ``seed``: see ``FakeDevice``. ``images``:
        costs of images; None without images."""
        self.name = name
        self.role = role
        patch_seconds = 0.0 if images is None else images.patch_seconds
        self.device = FakeDevice(cost, VOCABULARY, noise, seed, patch_seconds=patch_seconds)
        self.incarnation = seed + 1
        self.link_free_at = 0.0
        """Time at which the link has sent everything queued so far."""
        scheduler: Scheduler | EncodeScheduler
        if role == "encode":
            assert kv.media is not None
            scheduler = EncodeScheduler(kv.media, section, MOST_PIXELS)
        else:
            scheduler = Scheduler(kv, section, VOCABULARY, None, TransferSection(role=role))
        clock = deployment.timeline.clock
        super().__init__(scheduler, FakeRanks(self.device, clock), clock, depth_of(section))
        self.protocol = EngineProtocol(self, self.incarnation)
        self._kv = kv
        self._section = section
        self._deployment = deployment

    # ---- the engine of the protocol

    def _open(self, submit: m.Submit) -> None:
        if submit.transfer is not None:
            self._deployment.transfers.open(submit.transfer, self)
        for item in submit.media:
            if item.transfer is not None:
                self._deployment.images.open(item.transfer, self)

    def part(self, cache: Cache) -> SchedulerPart | None:
        """Return the scheduler's interface for transfers of ``cache``; None without transfers."""
        if cache == "embeddings":
            return self.scheduler.embeddings
        return None if self.role == "encode" else self.scheduler

    def welcome(self, incarnation: int) -> m.Welcome:
        """Return the description of the group for the fleet."""
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
            transfer_address="" if self.role in ("unified", "encode") else self.name,
            tower=self._kv.media is not None and self._kv.media.tower,
            embeddings="" if self.scheduler.embeddings is None else self.name,
            tower_fingerprint="" if self._kv.media is None else "one tower",
        )

    # ---- the loop of the group

    def deliver(self, events: list[m.TokenEvent]) -> None:
        """Deliver ``events``, which the scheduler returned for a transfer, and continue the loop."""
        self._deployment.send_to_front(self, self.protocol.events(events))
        self.turn()

    def receive(self, message: m.ToEngine) -> None:
        """Handle a ``message`` of the API server, and continue the loop."""
        self._deployment.send_to_front(self, self.protocol.on(_FRONT, message))
        self.turn()

    def turn(self) -> None:
        """Launch steps as far as the number of steps in flight allows."""
        events = self.poll()
        while self.launch(events):
            pass
        self._deployment.send_to_front(self, self.protocol.events(events))

    def _launch(self, plan: StepPlan, began: float) -> None:
        super()._launch(plan, began)
        self._deployment.timeline.at(self._in_flight[-1].handle.complete, None, self._step_ended)

    def _step_ended(self) -> None:
        """Send the positions of the oldest step, commit the step, and continue the loop."""
        for op in self._in_flight[0].handle.plan.ops:
            if isinstance(op, Export):
                self._deployment.transfers.send(op.key, op.start, op.end)
            elif isinstance(op, SendMedia):
                self._deployment.images.send(op.key, 0, op.count)
        events: list[m.TokenEvent] = []
        self.commit(events)
        self._deployment.send_to_front(self, self.protocol.events(events, self.steps))
        self.turn()

    def _serve_requests(self) -> list[m.TokenEvent]:
        self._deployment.serve(self)
        return []


class Deployment:
    """One run: groups, an API server, and requests. The seed determines the run."""

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
        """Build the groups, each with ``kv``, ``section`` and ``cost``. ``shared``: leading tokens common to
        all prompts. ``images``: costs of images, None without images."""
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
                _with_images(kv, role, groups, images, most),
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
                r.CacheGroupDims(
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
        self.transfers = SimulatedTransfers(self.timeline, wire, self.groups, dims)
        rows = wire._replace(position_bytes=(costs := images or ImageCosts(1, 0.0, 1)).row_bytes)
        self.images = SimulatedTransfers(self.timeline, rows, self.groups, costs.dims(), "embeddings")

    @property
    def now(self) -> float:
        """Seconds of virtual time."""
        return self.timeline.now

    def run(self, limits: tuple[float, float] = (math.inf, math.inf)) -> SimulatedOutcome:
        """Run until all requests have ended, and return the results.

        ``limits`` are (TTFT, TPOT) in seconds, for ``SimulatedOutcome.good``. Raises the error of a failed
        fleet.
        """
        for number, name in enumerate(self.groups, 1):
            self._feed(e.Expected(name, number))
            self._feed(e.Located(name, number))
            self._feed(e.Linked(name, number))
        for number, arrival in enumerate(self._arrivals):
            self.timeline.at(arrival.at, None, self._open, number, arrival)
        self.timeline.at(HEARTBEAT_S, None, self._heartbeat)
        # Heartbeats repeat for ever, so the heap never empties.
        while self._unfinished():
            self.timeline.advance()
        return self._outcome(limits)

    def serve(self, group: Group) -> None:
        """Carry out the transfer actions requested by the scheduler of ``group``."""
        self.transfers.serve(group)
        self.images.serve(group)

    def _unfinished(self) -> bool:
        ended = sum(stream.finish is not None for stream in self.streams.values())
        return ended + self.refused < len(self._arrivals)

    # ---- the API server

    def _open(self, number: int, arrival: Arrival) -> None:
        """Make the prompt and images of request ``number`` and pass the request to the fleet."""
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
        """Pass an event to the fleet, execute the actions and schedule the next deadline.

        Raises the error of a failed fleet."""
        for action in self.fleet.on(event, self.now):
            self._act(action)
        due = self.fleet.next_deadline()
        if due < math.inf:
            self.timeline.at(due, None, self._tick)

    def _act(self, action: e.Action) -> None:
        if isinstance(action, e.Send):
            self.timeline.at(self.now, None, self.groups[action.instance].receive, action.message)
        elif isinstance(action, e.Deliver):
            self._deliver(action.events)
        elif isinstance(action, e.Failed):
            raise action.error

    def _tick(self) -> None:
        if self.fleet.next_deadline() <= self.now:
            self._feed(e.Tick())

    def _deliver(self, events: Sequence[m.TokenEvent]) -> None:
        """Record the times of tokens and the ends.

        A request with an error counts as refused, and its stream is removed.
        """
        for event in events:
            stream = self.streams[event.sequence]
            stream.times += [self.now] * len(event.token_ids)
            if event.finish == "error":
                self.refused += 1
                del self.streams[event.sequence]
            elif event.finish is not None:
                stream.finish = event.finish

    def send_to_front(self, group: Group, outgoing: Sequence[tuple[bytes, m.ToFront]]) -> None:
        """Send the messages of a group's engine to the API server."""
        link = list(self.groups).index(group.name) + 1
        for _, message in outgoing:
            self.timeline.at(self.now, None, self._feed, e.Received(group.name, link, message))

    def _heartbeat(self) -> None:
        for group in self.groups.values():
            self.send_to_front(group, group.protocol.heartbeats())
            group.turn()
        self.timeline.at(self.now + HEARTBEAT_S, None, self._heartbeat)

    # ---- results

    def _outcome(self, limits: tuple[float, float]) -> SimulatedOutcome:
        """Return the results of the ended run. ``limits``: (TTFT, TPOT) in seconds of a good request."""
        streams = list(self.streams.values())
        started = [stream for stream in streams if stream.times]
        waits = [stream.times[0] - stream.arrival.at for stream in started]
        paces = [pace(stream) for stream in started]
        # A refused request has no stream, so the request counts against the share of good requests.
        good = sum(wait <= limits[0] and pace <= limits[1] for wait, pace in zip(waits, paces, strict=True))
        now = max((stream.times[-1] for stream in started), default=0.0)
        return SimulatedOutcome(
            groups=self._groups,
            requests=len(self._arrivals),
            done=sum(stream.done for stream in streams),
            refused=self.refused,
            seconds=now,
            ttft=Latency.of(waits),
            itl=Latency.of(gaps(streams)),
            tpot=Latency.of(paces),
            output_rate=rate(sum(len(stream.times) for stream in streams), now),
            exposed=Latency.of(self.transfers.exposed),
            busy={
                name: min(group.device.busy / now, 1.0) if now else 0.0 for name, group in self.groups.items()
            },
            good=good / len(self._arrivals) if self._arrivals else 0.0,
        )


def _with_images(
    kv: KVConfig, role: m.Role, groups: Groups, images: ImageCosts | None, most: int
) -> KVConfig:
    """Return the settings of a group of ``role``, with images if there are any.

    An encode group has a vision tower. A compute group has a tower only if there are no encode groups.
    """
    if images is None:
        return kv
    computes = role in ("unified", "prefill")
    takes = computes and groups.encode > 0
    tower = role == "encode" or (computes and not takes)
    return msgspec.structs.replace(kv, media=images.limits(max(most, 1), tower=tower, takes=takes))


def pace(stream: Stream) -> float:
    """Return the mean seconds between two tokens; 0 with fewer than two tokens."""
    times = stream.times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
