"""The engine of a simulated engine process: the product's ``EngineLoop`` over the product's ``Scheduler``.

``GroupRunner`` stands for ``weft.engine.group.GroupExecutor``: the loop's executor, over a simulated group.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from testing.cluster.check import VOCABULARY, TokenModel, require
from testing.cluster.group import Group
from testing.cluster.ranks import Work
from testing.cluster.sim_tier import SimTier
from testing.cluster.transfers.sides import Sides
from weft.common.clock import Clock
from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection, TransferSection
from weft.engine.disagg.engine_transfers import EngineTransfers
from weft.engine.event_sources import sources_of
from weft.engine.loop import EngineLoop, Executor
from weft.kv.cache_groups import FullGroup
from weft.scheduler import Scheduler
from weft.scheduler.encode.book import ItemBook
from weft.scheduler.encode.encode_scheduler import EncodeScheduler
from weft.scheduler.images.image_transfers import ImageTransfers
from weft.sim.engine import depth_of
from weft.sim.images import patches_in
from weft.types import messages as m
from weft.types.frames import Cache
from weft.types.plan import AppendBlocks, AppendEach, StepPlan, StepResult
from weft.types.transfer import TransferKey

STEP_S = 0.02
"""Seconds of a step; as much again for every 8 tokens and patches."""
MOST_PIXELS = 80
"""Limit on the bytes of pixels in an encode group: a few images."""


class Poisoned(Exception):
    """The process dies of the step."""


class Launched(NamedTuple):
    """A step on the simulated ranks."""

    plan: StepPlan
    result: StepResult
    epoch: int
    complete: float
    """Time of completion, for a group of one rank."""
    dies: bool


class GroupRunner(Executor[Launched]):
    """Launches plans on the ranks of a simulated group, and checks the use of blocks."""

    def __init__(self, model: TokenModel, clock: Clock) -> None:
        self.model = model
        self.group: Group | None = None
        """The group, once the process listens."""
        self.sides: Sides | None = None
        """Transfer sides of the engine's own rank, in a group with transfers, once the process serves."""
        self.pins: Counter[int] = Counter()
        """Pin counts of blocks open to writes by outside processes."""
        self.tier: SimTier | None = None
        """KV tier of the process; None without a tier."""
        self.held_over: set[int] = set()
        """Pinned blocks from before the last loss of the group."""
        self._clock = clock
        self._free_at = 0.0
        self._slots: dict[int, int] = {}
        """Slot -> key, for the checksums of the engine's own rank."""

    def forward(self, plan: StepPlan) -> Launched:
        if self.held_over:
            self._check_blocks(plan)
        if self.tier is not None:
            self.tier.check(plan)
        result, step, dies = self.model.run(plan)
        if self.sides is not None:
            self.sides.run(plan)
        seconds = STEP_S * (1.0 + (step.tokens + patches_in(plan)) / 8)
        self._free_at = max(self._clock.now(), self._free_at) + seconds
        assert self.group is not None
        epoch = self.group.membership.epoch
        if self.group.others:
            # Each rank computes the checksum from a slot table of its own; a difference shows a lost step.
            checksum = step.run(self._slots)
            content = None if self.sides is None else plan
            self.group.launch(Work(epoch, plan.step, seconds, checksum, step.run, content))
        return Launched(plan, result, epoch, self._free_at, dies)

    def read(self, handle: Launched) -> StepResult:
        """Return the result of an ended step. Raise Poisoned if the process dies of the step."""
        assert self.group is not None
        self.group.check_count(handle.plan.step, handle.epoch)
        if handle.dies:
            raise Poisoned
        return handle.result

    def check(self) -> None:
        """Raise GroupLost while the loss of an epoch is not handled."""
        assert self.group is not None
        if (lost := self.group.membership.unresumed) is not None:
            raise lost

    def recovered(self, wait: float) -> bool:
        """Begin a new epoch with empty slots. Return True: the group runs."""
        self._free_at = 0.0
        self.model.clear()
        self._slots.clear()
        # Blocks pinned across the loss must not be handed out until the pins are released.
        self.held_over = set(self.pins)
        if self.sides is not None:
            self.sides.reset()
        return True

    def _check_blocks(self, plan: StepPlan) -> None:
        """Raise Violation if ``plan`` hands out a block pinned since before a loss."""
        for op in plan.ops:
            if isinstance(op, AppendBlocks | AppendEach):
                held = self.held_over.intersection(op.blocks.tolist())
                require(not held, f"step {plan.step} gives blocks {sorted(held)} away, which are pinned")


class Engine(EngineLoop[Launched]):
    """The engine loop on virtual time, with state for the checks."""

    scheduler: Scheduler | EncodeScheduler
    runner: GroupRunner

    def __init__(
        self,
        kv: KVConfig,
        section: SchedulerSection,
        model: TokenModel,
        clock: Clock,
        transfer: TransferSection = TransferSection(),
    ) -> None:
        scheduler: Scheduler | EncodeScheduler
        if transfer.role == "encode":
            assert kv.media is not None
            scheduler = EncodeScheduler(kv.media, section, MOST_PIXELS)
        else:
            scheduler = Scheduler(kv, section, VOCABULARY, None, transfer)
        super().__init__(scheduler, GroupRunner(model, clock), clock, depth_of(section))
        self.kv = kv
        self.transfer = transfer
        self.section = section
        self.late_images = 0
        """Number of sequences with late images."""
        self.tier: SimTier | None = None
        """KV tier of the process; None without a tier."""

    def open_transfers(self, transfers: EngineTransfers | None, embeddings: EngineTransfers | None) -> None:
        """Begin the transfers of the group."""
        self.transfers, self.embeddings = transfers, embeddings
        self.sources = sources_of(None, transfers, embeddings, None)

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        """End a sequence, and carry out the consequences at once: a fault may end the sequence, and no turn
        of the loop follows."""
        return super().finish(sequence) + self._serve_requests()

    def poll(self) -> list[m.TokenEvent]:
        """Take the news of transfers, and count the sequences that end because of late images."""
        if isinstance(self.scheduler, EncodeScheduler):
            return super().poll()
        state = self.scheduler._state
        late = state.images.late(self._clock.now())
        events = super().poll()
        self.late_images += sum(sequence.id not in state.live for sequence in late)
        return events

    def _plan(self, now: float) -> StepPlan | None:
        """Return the next plan. Raise Violation if the scheduler would wait for ever with work at hand."""
        plan = super()._plan(now)
        stuck = not self.scheduler.in_flight and self.scheduler.has_work()
        require(not stuck, "work waits and nothing is planned")
        return plan

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
            transfer_address="" if self.transfers is None else self.transfers.address,
            tower=self.kv.media is not None and self.kv.media.tower,
            embeddings="" if self.embeddings is None else self.embeddings.address,
            tower_fingerprint="" if self.kv.media is None else "one tower",
        )

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
            events = scheduler._state.transfers.events
        return {event.sequence for event in events}

    def moves(self, sequence: int) -> bool:
        """Return True if a transfer of the sequence has not ended."""
        scheduler = self.scheduler
        if isinstance(scheduler, EncodeScheduler):
            return sequence in scheduler._book.live
        found = scheduler._state.live[sequence]
        return scheduler._state.transfers.of(found) is not None or found.blocked_images

    def held_for(self, cache: Cache, key: TransferKey) -> set[int] | None:
        """Return the blocks pinned for a transfer; None if the transfer has ended."""
        if cache == "kv":
            assert isinstance(self.scheduler, Scheduler)
            record = self.scheduler._state.transfers.get(key)
            return None if record is None else {block for _, block in record.held}
        book: ItemBook | ImageTransfers = (
            self.scheduler._book
            if isinstance(self.scheduler, EncodeScheduler)
            else self.scheduler._state.images
        )
        transfer = book.get(key)
        if transfer is None:
            return None
        return set() if transfer.held is None else set(transfer.held.blocks)

    def image_transfers(self) -> list[TransferKey]:
        """Return the keys of the transfers of embeddings to this engine."""
        if isinstance(self.scheduler, EncodeScheduler):
            return []
        return list(self.scheduler._state.images._transfers)

    def pin(self, seconds: float, now: float) -> list[int]:
        """Pin the blocks of a running sequence until ``now`` + ``seconds``, as if an outside process wrote to
        the blocks. Return the blocks; [] without a running sequence.
        """
        if isinstance(self.scheduler, EncodeScheduler):
            return []
        state = self.scheduler._state
        kind = state.caches.kinds[0]
        assert isinstance(kind, FullGroup)
        blocks: list[int] = []
        # The blocks of the first running sequence, without the null block.
        for slot in state.order().tolist()[:1]:
            blocks = [block for block in kind._tables[slot].blocks if block]
        for block in blocks:
            self.scheduler.pin(0, block, now + seconds)
            self.runner.pins[block] += 1
        return blocks

    def unpin(self, blocks: list[int]) -> None:
        """Release blocks pinned by ``pin``."""
        assert isinstance(self.scheduler, Scheduler)
        self.runner.pins.subtract(blocks)
        # Adding an empty counter drops the entries that reached zero.
        self.runner.pins += Counter()
        self.runner.held_over.intersection_update(self.runner.pins)
        for block in blocks:
            self.scheduler.unpin(0, block)
