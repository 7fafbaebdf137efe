"""The engine of a simulated engine process: the loop of ``weft.engine.core`` over the product's
``Scheduler``."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import msgspec

from testing.cluster.check import VOCABULARY, TokenModel, require
from testing.cluster.group import Group
from testing.cluster.ranks import Work
from testing.cluster.transfers.sides import Sides
from weft.common.clock import Clock
from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection, TransferSection
from weft.engine.disagg.rooms import HeadRooms, RoomScheduler
from weft.kv.kinds import FullKind
from weft.kv.prefix_log import PrefixLog
from weft.scheduler import Scheduler
from weft.scheduler.encode.book import ItemBook
from weft.scheduler.encode.scheduler import EncodeScheduler
from weft.scheduler.images.image_rooms import ImageRooms
from weft.sim.engine import depth_of
from weft.sim.images import patches_in
from weft.types import messages as m
from weft.types.frames import Cache
from weft.types.plan import AppendBlocks, AppendEach, StepPlan, StepResult
from weft.types.rooms import RoomKey, RoomTicket

STEP_S = 0.02
"""Seconds of a step; as much again for every 8 tokens and patches."""
MOST_PIXELS = 80
"""Limit on the bytes of pixels in an encode group: a few images."""


class _Launched(NamedTuple):
    plan: StepPlan
    result: StepResult
    epoch: int
    complete: float
    """Time of completion, for a group of one rank."""
    dies: bool


class Engine:
    """The loop of ``EngineCore`` on virtual time, with one or two steps in flight."""

    def __init__(
        self,
        kv: KVConfig,
        section: SchedulerSection,
        model: TokenModel,
        clock: Clock,
        transfer: TransferSection = TransferSection(),
    ) -> None:
        """``kv``, ``section``, ``transfer``: settings. ``model``: the device. ``clock``: of the schedule."""
        self.kv = kv
        self.transfer = transfer
        self.rooms: dict[Cache, HeadRooms] = {}
        """Transfers by cache, in a group with transfers, once the process serves."""
        self.sides: Sides | None = None
        """Transfer sides of the engine's own rank, in a group with transfers, once the process serves."""
        self._clock = clock
        self.section = section
        self.model = model
        self.group: Group | None = None
        """The group, once the process listens."""
        self.holds: Counter[int] = Counter()
        """Pin counts of blocks open to writes by outside processes."""
        self.held_over: set[int] = set()
        """Pinned blocks from before the last loss of the group."""
        self.scheduler: Scheduler | EncodeScheduler
        if transfer.role == "encode":
            assert kv.media is not None
            self.scheduler = EncodeScheduler(kv.media, section, MOST_PIXELS)
        else:
            self.scheduler = Scheduler(kv, section, VOCABULARY, None, transfer)
        self.late_images = 0
        """Number of sequences with late images."""
        self.recovering = False
        """True between the loss of ranks and the next epoch; no step is made meanwhile."""
        self._depth = depth_of(section)
        self._in_flight: deque[_Launched] = deque()
        self._free_at = 0.0
        self._slots: dict[int, int] = {}
        """Slot -> key, for the checksums of the engine's own rank."""

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        """Queue a sequence and open its transfers.

        Return the resulting events. Raises the errors of ``Scheduler.add``.
        """
        events = self.scheduler.add(submit, self._clock.now())
        tickets: list[tuple[Cache, RoomTicket | None]] = [("kv", submit.room)]
        tickets += [("embeddings", item.room) for item in submit.media]
        for cache, ticket in tickets:
            if ticket is not None and cache in self.rooms:
                self.rooms[cache].open(ticket)
        return events + self.asked()

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        return self.scheduler.finish(sequence) + self.asked()

    def asked(self) -> list[m.TokenEvent]:
        """Carry out the transfer actions requested by the scheduler. Return the resulting events."""
        return [event for cache, rooms in self.rooms.items() for event in rooms.asked(self.part(cache))]

    def part(self, cache: Cache) -> RoomScheduler:
        """Return the scheduler's interface for transfers of ``cache``."""
        if cache == "embeddings":
            assert self.scheduler.embeddings is not None
            return self.scheduler.embeddings
        return self.scheduler

    def hear(self) -> list[m.TokenEvent]:
        """Apply news of transfers and expire deadlines. Return the resulting events."""
        if not self.rooms:
            return []
        events = [event for cache, rooms in self.rooms.items() for event in rooms.take(self.part(cache))]
        now = self._clock.now()
        if isinstance(self.scheduler, Scheduler):
            self.late_images += len(self.scheduler._state.images.late(now))
        return events + self.scheduler.expire(now) + self.asked()

    @property
    def transferring(self) -> bool:
        """True if a transfer is not yet finished."""
        return any(rooms.moving for rooms in self.rooms.values())

    def has_work(self) -> bool:
        return self.recovering or bool(self._in_flight) or self.scheduler.has_work()

    def stats(self) -> m.HeadStats:
        """Return the scheduler's counters with those of the transfers."""
        stats = self.scheduler.stats()
        rooms, images = self.rooms.get("kv"), self.rooms.get("embeddings")
        if rooms is not None:
            stats = msgspec.structs.replace(stats, transfers=rooms.stats(stats.transfers))
        if images is not None:
            told = images.stats(stats.embedding_transfers)
            stats = msgspec.structs.replace(stats, embedding_transfers=told)
        return stats

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        return self.scheduler.follow_prefixes()

    def welcome(self, incarnation: int) -> m.Welcome:
        """Return the description of the engine for API servers."""
        return m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=VOCABULARY,
            max_model_len=self.kv.max_model_len,
            max_num_seqs=self.section.max_num_seqs,
            num_blocks=tuple(pool.num_blocks for pool in self.kv.pools),
            incarnation=incarnation,
            block_size=self.kv.block_size,
            role=self.transfer.role,
            fingerprint="one model" if self.transfer.role in ("prefill", "decode") else "",
            rooms=self.rooms["kv"].address if "kv" in self.rooms else "",
            tower=self.kv.media is not None and self.kv.media.tower,
            embeddings=self.rooms["embeddings"].address if "embeddings" in self.rooms else "",
            tower_fingerprint="" if self.kv.media is None else "one tower",
        )

    def launch(self, now: float) -> _Launched | None:
        """Launch the next step, if any.

        Return the oldest step in flight if the loop must wait for it, else None.
        """
        builder = self.scheduler.build(now) if len(self._in_flight) < self._depth else None
        plan = None if builder is None else self.scheduler.seal(builder)
        if plan is not None:
            self._launch(plan, now)
        # Wait only when nothing can be launched beside the steps in flight.
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            return self._in_flight[0]
        return None

    def commit_oldest(self, now: float) -> list[m.TokenEvent] | None:
        """Commit the oldest step and return the events; None if the process dies of the step.

        Raise Violation if the step may not count yet.
        """
        step = self._in_flight.popleft()
        assert self.group is not None
        self.group.check_count(step.plan.step, step.epoch)
        if step.dies:
            return None
        return self.scheduler.commit(step.plan, step.result, now) + self.asked()

    def lose_group(self) -> int:
        """Drop the epoch with all steps in flight, and fail all transfers.

        Return the number of dropped steps. Sets ``recovering``.
        """
        lost = len(self._in_flight)
        self._in_flight.clear()
        self.recovering = True
        self.scheduler.lose()
        for rooms in self.rooms.values():
            rooms.lose()
        return lost

    def regroup(self) -> list[m.TokenEvent]:
        """Begin a new epoch with empty slots: requeue all sequences. Return the resulting events."""
        self.recovering = False
        self._free_at = 0.0
        self.model.clear()
        self._slots.clear()
        # Blocks pinned across the loss must not be handed out until the pins are released.
        self.held_over = set(self.holds)
        events = self.scheduler.requeue_all()
        if self.sides is not None:
            self.sides.reset()
        for rooms in self.rooms.values():
            rooms.regain()
        return events + self.asked()

    # ---- state for checks

    def live(self) -> set[int]:
        """Return the sequences of the engine."""
        scheduler = self.scheduler
        state = scheduler._book if isinstance(scheduler, EncodeScheduler) else scheduler._state
        return set(state.live)

    def given_back(self) -> set[int]:
        """Return the sequences with a final event that API servers receive at the next turn."""
        scheduler = self.scheduler
        if isinstance(scheduler, EncodeScheduler):
            events = scheduler._events
        else:
            events = scheduler._state.rooms.events
        return {event.sequence for event in events}

    def moves(self, sequence: int) -> bool:
        """Return True if a transfer of the sequence has not ended."""
        scheduler = self.scheduler
        if isinstance(scheduler, EncodeScheduler):
            return sequence in scheduler._book.live
        found = scheduler._state.live[sequence]
        return scheduler._state.rooms.of(found) is not None or found.awaits_images

    def held_for(self, cache: Cache, key: RoomKey) -> set[int] | None:
        """Return the blocks pinned for a transfer; None if the transfer has ended."""
        if cache == "kv":
            assert isinstance(self.scheduler, Scheduler)
            record = self.scheduler._state.rooms.get(key)
            return None if record is None else {block for _, block in record.held}
        book: ItemBook | ImageRooms = (
            self.scheduler._book
            if isinstance(self.scheduler, EncodeScheduler)
            else self.scheduler._state.images
        )
        room = book.get(key)
        if room is None:
            return None
        return set() if room.held is None else set(room.held.blocks)

    def image_rooms(self) -> list[RoomKey]:
        """Return the keys of the transfers of embeddings to this engine."""
        if isinstance(self.scheduler, EncodeScheduler):
            return []
        return list(self.scheduler._state.images._rooms)

    def hold(self, seconds: float, now: float) -> list[int]:
        """Pin the blocks of a running sequence until ``now`` + ``seconds``, as if an outside process wrote to
        the blocks. Return the blocks; [] without a running sequence.
        """
        if isinstance(self.scheduler, EncodeScheduler):
            return []
        state = self.scheduler._state
        kind = state.caches.kinds[0]
        assert isinstance(kind, FullKind)
        blocks: list[int] = []
        # The blocks of the first running sequence, without the null block.
        for slot in state.order().tolist()[:1]:
            blocks = [block for block in kind._tables[slot].blocks if block]
        for block in blocks:
            self.scheduler.hold(0, block, now + seconds)
            self.holds[block] += 1
        return blocks

    def unhold(self, blocks: list[int]) -> None:
        """Release blocks pinned by ``hold``."""
        assert isinstance(self.scheduler, Scheduler)
        self.holds.subtract(blocks)
        # Adding an empty counter drops the entries that reached zero.
        self.holds += Counter()
        self.held_over.intersection_update(self.holds)
        for block in blocks:
            self.scheduler.unhold(0, block)

    def _launch(self, plan: StepPlan, now: float) -> None:
        """Run ``plan`` at once on the token model and on the own memory, append the step to the steps in
        flight, and send the step to the ranks. Raise Violation.
        """
        if self.held_over:
            self._check_blocks(plan)
        result, step, dies = self.model.run(plan)
        if self.sides is not None:
            self.sides.run(plan)
        seconds = STEP_S * (1.0 + (step.tokens + patches_in(plan)) / 8)
        self._free_at = max(now, self._free_at) + seconds
        assert self.group is not None
        epoch = self.group.membership.epoch
        self._in_flight.append(_Launched(plan, result, epoch, self._free_at, dies))
        if self.group.others:
            # Each rank computes the checksum from a slot table of its own; a difference shows a lost step.
            checksum = step.run(self._slots)
            content = None if self.sides is None else plan
            self.group.launch(Work(epoch, plan.step, seconds, checksum, step.run, content))

    def _check_blocks(self, plan: StepPlan) -> None:
        """Raise Violation if ``plan`` hands out a block pinned since before a loss."""
        for op in plan.ops:
            if isinstance(op, AppendBlocks | AppendEach):
                held = self.held_over.intersection(op.blocks.tolist())
                require(not held, f"step {plan.step} gives blocks {sorted(held)} away, which are on hold")
