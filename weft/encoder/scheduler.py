"""The scheduler of a group that only encodes images: in place of ``weft.scheduler.Scheduler``, and as pure.

A Submit has images with pixels, each with the room in which its embedding is to be sent, and no prompt. Its
rooms are offered at once. Plans have ops and no rows. A sequence ends

    moved     all of its embeddings are where they were to go
    evicted   a room failed, with the room's error, or the group lost ranks: its front sends it again
    error     an image of it cannot be encoded
    abort     its front says so

See ``weft.encoder.book`` for the life of a room, and ``weft.encoder.batch`` for what a step does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from weft.common.errors import (
    Cancelled,
    EngineDead,
    ErrorInfo,
    ImageFailed,
    Overloaded,
    RanksLost,
    Unavailable,
)
from weft.config.resolved import MediaLimits
from weft.config.sections import SchedulerSection
from weft.encoder.batch import Batch
from weft.encoder.book import ItemBook, ItemRoom, ItemSequence
from weft.kv.embeddings import EmbeddingCache
from weft.kv.prefix_log import PrefixLog
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.slot_columns import SlotColumns
from weft.types.messages import HeadStats, Submit, TokenEvent
from weft.types.plan import StepPlan, StepResult, TokenMasks
from weft.types.rooms import (
    Blocks,
    CancelRoom,
    FinishRoom,
    OfferRoom,
    RoomBound,
    RoomEvent,
    RoomFailed,
    RoomFreed,
    RoomKey,
    RoomLanded,
    RoomRequest,
)

MAX_IN_FLIGHT = 2


class EncodeScheduler:
    """The control core of one group. Its methods are those of ``Scheduler`` that an engine calls."""

    def __init__(self, limits: MediaLimits, section: SchedulerSection, most_pixels: int) -> None:
        """``most_pixels``: bytes of pixels of all sequences; one alone may have more."""
        self._limits, self._section, self._most_pixels = limits, section, most_pixels
        self.cache = EmbeddingCache(
            limits.blocks, limits.host_blocks, row_bytes=limits.row_bytes, block_rows=limits.block_rows
        )
        self._book = ItemBook(limits)
        self._columns = SlotColumns(0)
        self._requests: list[RoomRequest] = []
        self._events: list[TokenEvent] = []
        """Ends of sequences that were not told yet."""
        self._step = self._steps = 0
        self._built: tuple[PlanBuilder, Batch | None] | None = None
        self._in_flight: deque[tuple[StepPlan, list[ItemRoom]]] = deque()
        """Plans that await their commit, with the rooms that they send."""
        self._starved: ItemRoom | None = None
        """The first in order of the rooms that are bound, where the pool was full for it."""
        self._hurries = True
        """Whether what is there may leave in a step of its own: in the last one it did not."""
        self._admitted: list[int] = []
        """Sequences of which the last plan was the first with anything."""
        self._blocked = False
        """Whether nothing can be planned until something changes."""
        self._whole = True
        """Whether there are ranks to offer rooms for."""

    @property
    def embeddings(self) -> EncodeScheduler:
        """Takes part in rooms of embeddings."""
        return self

    # ---- sequences

    def add(
        self, submit: Submit, now: float, awaits: bool = False, until: float | None = None
    ) -> list[TokenEvent]:
        """Takes in images. Raises InvalidRequest or Overloaded before anything is changed."""
        pixels = self._book.check(submit)
        live = len(self._book.live)
        full = live and self._book.pixels + pixels > self._most_pixels
        if full or live >= self._section.max_queued_requests:
            raise Overloaded(f"{live} sequences wait for their images already; try again later")
        sequence = self._book.add(submit)
        if self._whole:
            self._offer(sequence)
        self._blocked = False
        return []

    def finish(self, sequence: int) -> list[TokenEvent]:
        """Ends a sequence from outside. As ``Scheduler.finish``."""
        found = self._book.live.get(sequence)
        if found is None:
            told = [event for event in self._events if event.sequence == sequence]
            self._events = [event for event in self._events if event.sequence != sequence]
            return told
        self._end(found, "abort", None, Cancelled("the client went away").info())
        told, self._events = self._events[-1:], self._events[:-1]
        return told

    def arrived(self, sequence: int) -> None:
        """Nothing awaits anything but its rooms."""

    def constrain(self, sequence: int, matcher: object, end_ids: Iterable[int]) -> list[TokenEvent]:
        """No sequence has a grammar."""
        return []

    def fail(self, sequence: int, error: ErrorInfo) -> list[TokenEvent]:
        """Ends a sequence with ``error``. Unknown ids are fine."""
        if (found := self._book.live.get(sequence)) is not None:
            self._end(found, "error", error, error)
        return self._given_back()

    def expire(self, now: float) -> list[TokenEvent]:
        """Rooms have their deadlines where they are kept; what became known of them is told."""
        return self._given_back()

    def lose(self) -> None:
        """Ranks are lost: every sequence is given back, with the code "group_lost". What comes until
        ``requeue_all`` waits, and its rooms are not offered: they would fail at once."""
        lost = RanksLost("processes of the group that encoded the images were lost").info()
        for sequence in list(self._book.live.values()):
            self._end(sequence, "evicted", lost, lost)
        self._whole = False

    def requeue_all(self) -> list[TokenEvent]:
        """As ``Scheduler.requeue_all``: the ranks have nothing, and no plan is in flight. Embeddings that a
        room may still be read from keep their blocks."""
        self._built = None
        if self._whole:
            self.lose()
        self._in_flight.clear()
        self.cache.clear()
        self._whole, self._blocked = True, False
        for sequence in self._book.live.values():
            self._offer(sequence)
        return self._given_back()

    # ---- rooms

    def room(self, event: RoomEvent, now: float) -> list[TokenEvent]:
        """Hears what happened to a room."""
        room = self._book.get(event.key)
        if room is None:
            return self._given_back()
        self._blocked = False
        match event:
            case RoomBound(_, start):
                self._bound(room, start)
            case RoomLanded():
                self._landed(room)
            case RoomFailed(_, error):
                self._failed(room, error)
            case RoomFreed():
                self._failed(room, Unavailable("the room has ended").info())
                self._let_go(room)
        return self._given_back()

    def room_requests(self) -> list[RoomRequest]:
        """What is asked of rooms since the last call, in order."""
        asked, self._requests = self._requests, []
        return asked

    def room_blocks(self, key: RoomKey) -> tuple[Blocks, ...]:
        """Where a room's embedding is, once it is to be sent; before that an empty table."""
        room = self._book.get(key)
        held = None if room is None else room.held
        return (Blocks(first=0, ids=b"" if held is None else held.ids),)

    # ---- steps

    def has_work(self) -> bool:
        """Whether there is something to plan or to commit."""
        return bool(self._in_flight) or self._can_plan

    @property
    def _can_plan(self) -> bool:
        return self.cache.asks or (not self._blocked and self._book.waits)

    @property
    def awaiting(self) -> bool:
        """Whether nothing can be done before something comes from outside."""
        return bool(self._book.live) and not self.has_work()

    @property
    def in_flight(self) -> int:
        """Plans that await their commit."""
        return len(self._in_flight)

    @property
    def steps(self) -> int:
        """Steps committed."""
        return self._steps

    def build(self, now: float) -> PlanBuilder | None:
        """The next step, for ``seal``, or None when nothing can be done before a commit or an event.

        Raises EngineDead when two steps are in flight already, or the last builder was not sealed.
        """
        builder = self._begin()
        batch = Batch(self._book, self.cache, self._limits, self._step)
        self._starved = batch.fill(self._starved, self._hurries)
        self._hurries = not batch.hurried
        if not self.cache.asks:
            self._blocked = True
            return None
        self._built = (builder, batch)
        return builder

    def idle(self) -> PlanBuilder:
        """The next step without anything. Raises as ``build``."""
        builder = self._begin()
        self._built = (builder, None)
        return builder

    def seal(self, builder: PlanBuilder) -> StepPlan:
        """Makes the plan of ``builder``, which is in flight from now on. Raises EngineDead for any but the
        last builder."""
        if self._built is None or builder is not self._built[0]:
            raise EngineDead("a step is to be launched that is not the one that was built last")
        batch = self._built[1]
        plan = builder.seal(self.cache.take_ops(self._step))
        sent = [] if batch is None else batch.sent
        first: dict[int, ItemSequence] = {}
        for room in [*sent, *([] if batch is None else batch.encoded)]:
            if not room.sequence.admitted:
                room.sequence.admitted = True
                first[room.sequence.id] = room.sequence
        self._admitted = list(first)
        if batch is not None:
            self.cache.encoded += len(batch.encoded)
            self.cache.hits += sum(not room.owner for room in sent)
        self._in_flight.append((plan, sent))
        self._step += 1
        self._built = None
        return plan

    def admitted(self, plan: StepPlan) -> list[int]:
        """Sequences of which ``plan``, the one that was sealed last, is the first with anything."""
        return self._admitted

    def masks(self, plan: StepPlan) -> TokenMasks:
        """No plan is constrained. Raises EngineDead."""
        raise EngineDead("a group that encodes images samples no tokens")

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """The oldest plan in flight was carried out. Raises EngineDead for another one."""
        if not self._in_flight or self._in_flight[0][0] is not plan or result.step != plan.step:
            raise EngineDead(f"step {result.step} is committed out of turn")
        _, sent = self._in_flight.popleft()
        self.cache.committed(plan.step)
        self._requests += [FinishRoom(key=room.key) for room in sent if not room.over]
        self._steps += 1
        self._blocked = False
        return self._given_back()

    def observe(self, plan: StepPlan, seconds: float, uncaptured: bool = False) -> None:
        """Nothing is learned from how long a step took."""

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """There are none."""
        return None

    def stats(self) -> HeadStats:
        """Counters and gauges: a sequence waits until all of its embeddings may leave."""
        waiting = self._book.unsent
        cache = self.cache
        return HeadStats(
            steps=self._steps,
            running=len(self._book.live) - waiting,
            waiting=waiting,
            kv_usage=sum(len(held.blocks) for held in cache if held.pins) / max(cache.blocks, 1),
            free_blocks=(cache.available,),
            images_encoded=cache.encoded,
            image_hits=cache.hits,
            embedding_bytes=cache.nbytes,
        )

    # ----

    def _begin(self) -> PlanBuilder:
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise EngineDead(f"{MAX_IN_FLIGHT} steps are in flight already")
        if self._built is not None:
            raise EngineDead("a step was built and never sealed")
        return PlanBuilder(self._step, 0, self._columns).close()

    def _offer(self, sequence: ItemSequence) -> None:
        for room in sequence.rooms:
            self._requests.append(OfferRoom(key=room.key, num_prompt=room.item.count, num_cached=0))

    def _bound(self, room: ItemRoom, start: int) -> None:
        """The receiver has memory for it, or has it: then nothing is sent, and it need not be encoded."""
        room.bound = True
        if start >= room.item.count and not (room.over or room.sent):
            self._book.send(room)
            self._requests.append(FinishRoom(key=room.key))

    def _landed(self, room: ItemRoom) -> None:
        sequence = room.sequence
        self._let_go(room)
        if room.over or self._book.live.get(sequence.id) is not sequence:
            return
        sequence.left -= 1
        if not sequence.left:
            self._end(sequence, "moved", None, None)

    def _failed(self, room: ItemRoom, error: ErrorInfo) -> None:
        """Ends the room's sequence. Of an image that cannot be encoded nothing is kept: other sequences with
        the same image try it again, and each fails by its own try."""
        self._book.fail(room)
        cannot = error.code == ImageFailed.code
        if cannot and room.held is not None:
            self.cache.drop(room.held)
        if room.held is None:
            self._book.close(room)
        if self._book.live.get(room.sequence.id) is room.sequence:
            self._end(room.sequence, "error" if cannot and room.owner else "evicted", error, error)

    def _let_go(self, room: ItemRoom) -> None:
        """Nobody outside touches the embedding for ``room`` any more."""
        held, room.held = room.held, None
        self._book.close(room)
        if held is not None:
            self.cache.unpin(held)

    def _end(
        self, sequence: ItemSequence, finish: str, error: ErrorInfo | None, why: ErrorInfo | None
    ) -> None:
        """``why``: what its rooms that have not ended are cancelled with."""
        self._requests += [CancelRoom(key=room.key, error=why) for room in self._book.end(sequence)]
        self._events.append(TokenEvent(sequence=sequence.id, finish=finish, error=error))
        self._blocked = False

    def _given_back(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events
