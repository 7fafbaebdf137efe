"""The engine of a simulated head: the loop of ``weft.engine.core`` over the real ``Scheduler``."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import msgspec

from weft.common.clock import Clock
from weft.config.resolved import KVConfig
from weft.config.sections import SchedulerSection, TransferSection
from weft.engine.rooms import HeadRooms
from weft.kv.kinds import FullKind
from weft.kv.prefix_log import PrefixLog
from weft.scheduler import Scheduler
from weft.sim.check import VOCABULARY, TokenModel, require
from weft.sim.engine import depth_of
from weft.sim.group import Group
from weft.sim.rank_side import RankSide
from weft.sim.ranks import Work
from weft.types import messages as m
from weft.types.plan import AppendBlocks, AppendEach, StepPlan, StepResult

STEP_S = 0.02
"""Of a step; and as much again for every 8 tokens."""


class _Launched(NamedTuple):
    plan: StepPlan
    result: StepResult
    epoch: int
    complete: float
    """When it is, where the group is one rank."""
    dies: bool


class Engine:
    """``EngineCore``'s loop on virtual time: one or two steps in flight."""

    def __init__(
        self,
        kv: KVConfig,
        section: SchedulerSection,
        model: TokenModel,
        clock: Clock,
        transfer: TransferSection = TransferSection(),
    ) -> None:
        self.kv = kv
        self.transfer = transfer
        self.rooms: HeadRooms | None = None
        """Once it serves, in a group with a role."""
        self.side: RankSide | None = None
        """Of the head's own rank, in a group with a role."""
        self._clock = clock
        self.section = section
        self.model = model
        self.group: Group | None = None
        """Once the process listens."""
        self.holds: Counter[int] = Counter()
        """Blocks that somebody outside may still write to."""
        self.held_over: set[int] = set()
        """Those of them that were on hold when the group was lost."""
        self.scheduler = Scheduler(kv, section, VOCABULARY, None, transfer)
        self.recovering = False
        """Whether ranks were lost, and no step is made until the group is whole."""
        self._depth = depth_of(section)
        self._in_flight: deque[_Launched] = deque()
        self._free_at = 0.0
        self._slots: dict[int, int] = {}
        """Slot -> key, from which this rank's checksums are made."""

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        events = self.scheduler.add(submit, self._clock.now())
        if self.rooms is not None and submit.room is not None:
            self.rooms.open(submit.room)
        return events + self.asked()

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        return self.scheduler.finish(sequence) + self.asked()

    def asked(self) -> list[m.TokenEvent]:
        """What the scheduler asks of rooms is carried out."""
        return [] if self.rooms is None else self.rooms.asked(self.scheduler)

    def hear(self) -> list[m.TokenEvent]:
        """Takes in what came of rooms."""
        if self.rooms is None:
            return []
        events = self.rooms.take(self.scheduler)
        return events + self.scheduler.expire(self._clock.now()) + self.asked()

    @property
    def transferring(self) -> bool:
        """Whether a room may still be done."""
        return self.rooms is not None and self.rooms.moving

    def has_work(self) -> bool:
        return self.recovering or bool(self._in_flight) or self.scheduler.has_work()

    def stats(self) -> m.HeadStats:
        stats = self.scheduler.stats()
        if self.rooms is None:
            return stats
        return msgspec.structs.replace(stats, transfers=self.rooms.stats(stats.transfers))

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        return self.scheduler.follow_prefixes()

    def welcome(self, incarnation: int) -> m.Welcome:
        """What a front must know of it."""
        return m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=VOCABULARY,
            max_model_len=self.kv.max_model_len,
            max_num_seqs=self.section.max_num_seqs,
            num_blocks=tuple(pool.num_blocks for pool in self.kv.pools),
            incarnation=incarnation,
            block_size=self.kv.block_size,
            role=self.transfer.role,
            fingerprint="" if self.transfer.role == "unified" else "one model",
            rooms="" if self.rooms is None else self.rooms.address,
        )

    def launch(self, now: float) -> _Launched | None:
        """Launches the next step, if any. The oldest one in flight, if that is waited for."""
        plan = self.scheduler.plan(now) if len(self._in_flight) < self._depth else None
        if plan is not None:
            self._launch(plan, now)
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            return self._in_flight[0]
        return None

    def commit_oldest(self, now: float) -> list[m.TokenEvent] | None:
        """What the oldest step made; None when the process died of it."""
        step = self._in_flight.popleft()
        assert self.group is not None
        self.group.check_count(step.plan.step, step.epoch)
        if step.dies:
            return None
        return self.scheduler.commit(step.plan, step.result, now) + self.asked()

    def lose_group(self) -> int:
        """The epoch is lost, and the steps in flight with it. Returns how many those were."""
        lost = len(self._in_flight)
        self._in_flight.clear()
        self.recovering = True
        self.scheduler.lose()
        if self.rooms is not None:
            self.rooms.lose()
        return lost

    def regroup(self) -> list[m.TokenEvent]:
        """An epoch runs again: all slots are empty."""
        self.recovering = False
        self._free_at = 0.0
        self.model.clear()
        self._slots.clear()
        self.held_over = set(self.holds)
        events = self.scheduler.requeue_all()
        if self.side is not None:
            self.side.reset()
        if self.rooms is not None:
            self.rooms.regain()
        return events + self.asked()

    def hold(self, seconds: float, now: float) -> list[int]:
        """Puts the blocks of a running sequence on hold: somebody outside writes to them. Returns them."""
        state = self.scheduler._state
        kind = state.caches.kinds[0]
        assert isinstance(kind, FullKind)
        blocks: list[int] = []
        for slot in state.order().tolist()[:1]:
            blocks = [block for block in kind._tables[slot].blocks if block]
        for block in blocks:
            self.scheduler.hold(0, block, now + seconds)
            self.holds[block] += 1
        return blocks

    def unhold(self, blocks: list[int]) -> None:
        """The other side of ``hold``."""
        self.holds.subtract(blocks)
        self.holds += Counter()
        self.held_over.intersection_update(self.holds)
        for block in blocks:
            self.scheduler.unhold(0, block)

    def _launch(self, plan: StepPlan, now: float) -> None:
        if self.held_over:
            self._check_blocks(plan)
        result, step, dies = self.model.run(plan)
        if self.side is not None:
            self.side.run(plan)
        seconds = STEP_S * (1.0 + step.tokens / 8)
        self._free_at = max(now, self._free_at) + seconds
        assert self.group is not None
        epoch = self.group.membership.epoch
        self._in_flight.append(_Launched(plan, result, epoch, self._free_at, dies))
        if self.group.others:
            checksum = step.run(self._slots)
            content = None if self.side is None else plan
            self.group.launch(Work(epoch, plan.step, seconds, checksum, step.run, content))

    def _check_blocks(self, plan: StepPlan) -> None:
        """Raises Violation where ``plan`` gives a block to somebody that is on hold since before a loss."""
        for op in plan.ops:
            if isinstance(op, AppendBlocks | AppendEach):
                held = self.held_over.intersection(op.blocks.tolist())
                require(not held, f"step {plan.step} gives blocks {sorted(held)} away, which are on hold")
