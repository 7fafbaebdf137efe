"""Transfers, receivers and ranks around an ``EncodeScheduler``, driven by random numbers.

The work of a rank is applied to a pool of labels. A label names the image whose rows are in a block. A send
of a block with another label is an error, and so is a write to a block that a receiver may still read.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from weft.common.errors import ErrorInfo, ImageFailed, Unavailable
from weft.config.resolved import MediaLimits
from weft.config.sections.all import SchedulerSection
from weft.scheduler.encode.encode_scheduler import EncodeScheduler
from weft.types.media_item import MediaItem
from weft.types.messages import Submit, TokenEvent
from weft.types.plan import EMPTY, Encode, MoveMedia, SendMedia, StepPlan, StepResult, column
from weft.types.sampling import TokenParams
from weft.types.transfer import (
    CancelTransfer,
    FinishTransfer,
    OfferTransfer,
    Peer,
    TransferBound,
    TransferFailed,
    TransferFreed,
    TransferKey,
    TransferParameters,
    TransferReceived,
)

PATCH, MERGE, BLOCK = 2, 2, 4
FAULT = Unavailable("a fault").info()


def limits(blocks: int = 12, host: int = 0, **more: int) -> MediaLimits:
    row = 8
    settings: dict[str, int] = {"encode_patches": 64, "encode_items": 4, **more}
    return MediaLimits(
        patch=PATCH,
        merge=MERGE,
        row_bytes=row,
        cache_bytes=blocks * BLOCK * row,
        host_bytes=host * BLOCK * row,
        most_items=16,
        block_rows=BLOCK,
        width=1,
        **settings,
    )


def item(name: int, tokens: int, key: TransferKey, start: int = 0, seconds: float = 60.0) -> MediaItem:
    """An image of one row of ``tokens``."""
    grid = (1, MERGE, MERGE * tokens)
    size = grid[1] * grid[2] * PATCH**2 * 3
    return MediaItem(
        key=name.to_bytes(16, "little"),
        start=start,
        count=tokens,
        grid=grid,
        pixels=bytes([name % 256]) * size,
        transfer=TransferParameters(key, True, Peer("there", 1), seconds),
    )


def submit(sequence: int, images: list[tuple[int, int]], **more: int) -> Submit:
    """images: (name, tokens) of each."""
    media, start = [], 0
    for number, (name, tokens) in enumerate(images):
        media.append(
            item(name, tokens, TransferKey(100 * sequence + number, more.get("attempt", 0), 7), start)
        )
        start += tokens + 1
    return Submit(
        sequence=sequence,
        request=sequence,
        seed=0,
        prompt_ids=b"",
        params=TokenParams(),
        media=tuple(media),
        **more,
    )


@dataclass
class Far:
    """A transfer from the view of the receiver and the ranks."""

    count: int
    bound: bool = False
    start: int = 0
    sent: tuple[int, ...] | None = None
    """Blocks that are being read."""
    finished: bool = False
    failing: ErrorInfo | None = None
    reported: bool = False
    """True once the failure was reported."""


@dataclass
class World:
    """One group."""

    limits: MediaLimits
    depth: int = 1
    section: SchedulerSection = field(default_factory=SchedulerSection)
    bad: set[int] = field(default_factory=set)
    """The simulation around one scheduler."""

    def __post_init__(self) -> None:
        self.scheduler = EncodeScheduler(self.limits, self.section, 1 << 30)
        self.transfers: dict[TransferKey, Far] = {}
        self.device: dict[int, bytes | None] = {}
        self.host: dict[int, bytes | None] = {}
        self.plans: deque[StepPlan] = deque()
        self.all: list[StepPlan] = []
        self.events: list[TokenEvent] = []
        self.now = 0.0
        self.names: dict[TransferKey, int] = {}

    # ---- what a head does

    def submit(self, one: Submit) -> None:
        self.events += self.scheduler.add(one, self.now)
        self.names |= {item.transfer.key: item.pixels[0] for item in one.media if item.transfer is not None}
        self.ask()

    def finish(self, sequence: int) -> list[TokenEvent]:
        events = self.scheduler.finish(sequence)
        self.events += events
        self.ask()
        return events

    def ask(self) -> None:
        while requests := self.scheduler.transfer_requests():
            for request in requests:
                match request:
                    case OfferTransfer(key, num_prompt):
                        assert key not in self.transfers
                        self.transfers[key] = Far(num_prompt)
                    case FinishTransfer(key):
                        far = self.transfers.get(key)
                        if far is not None:
                            assert not far.finished
                            assert far.bound
                            assert far.sent is not None or far.start >= far.count
                            far.finished = True
                    case CancelTransfer(key, error):
                        if (far := self.transfers.get(key)) is not None and far.failing is None:
                            far.failing = error or FAULT

    def launch(self) -> bool:
        """Plan a step and let the ranks execute the step. Return False if there is no step."""
        if len(self.plans) >= self.depth or not self.scheduler.has_work():
            return False
        builder = self.scheduler.build(self.now)
        if builder is None:
            return False
        plan = self.scheduler.freeze(builder)
        assert plan.ops
        self.plans.append(plan)
        self.all.append(plan)
        self._carry_out(plan)
        self.ask()
        return True

    def commit(self) -> None:
        plan = self.plans.popleft()
        result = StepResult(step=plan.step, rows=EMPTY, offsets=column([0]), tokens=EMPTY, accepted=EMPTY)
        self.events += self.scheduler.commit(plan, result, self.now)
        self.ask()

    # ---- what others do

    def bind(self, key: TransferKey, start: int = 0) -> None:
        far = self.transfers[key]
        assert not far.bound
        far.bound, far.start = True, start
        self._tell(TransferBound(key, start))

    def land(self, key: TransferKey) -> None:
        assert self.can_land(key)
        del self.transfers[key]
        self._tell(TransferReceived(key))

    def can_land(self, key: TransferKey) -> bool:
        far = self.transfers[key]
        return far.bound and far.finished and far.failing is None

    def fail(self, key: TransferKey, error: ErrorInfo = FAULT) -> None:
        """Fail the transfer; ``free`` follows later."""
        far = self.transfers[key]
        far.failing, far.reported = far.failing or error, True
        self._tell(TransferFailed(key, far.failing))

    def free(self, key: TransferKey) -> None:
        assert self.transfers[key].reported
        del self.transfers[key]
        self._tell(TransferFreed(key))

    def settle(self, turns: int = 1000) -> None:
        """Receivers take everything, in order, until nothing is left to do."""
        for _ in range(turns):
            moved = self.launch()
            if self.plans:
                self.commit()
                moved = True
            for key in list(self.transfers):
                far = self.transfers.get(key)
                if far is None:
                    continue
                if far.failing is not None:
                    self.fail(key)
                    self.free(key)
                elif not far.bound:
                    self.bind(key)
                elif self.can_land(key):
                    self.land(key)
                else:
                    continue
                moved = True
            if not moved:
                return
        raise AssertionError("it goes on for ever")

    def check_idle(self) -> None:
        """Nothing is left of anything but the cache."""
        cache = self.scheduler.cache
        assert not self.transfers
        assert not self.scheduler.has_work()
        assert not self.scheduler.blocked
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
        held = [one for one in cache if not one.on_host]
        assert all(not one.pins for one in cache)
        blocks = [block for one in held for block in one.blocks]
        assert len(set(blocks)) == len(blocks)
        assert cache.available + len(blocks) == cache.blocks

    def finishes(self, sequence: int) -> list[str | None]:
        return [event.finish for event in self.events if event.sequence == sequence]

    # ----

    def _tell(self, event: TransferBound | TransferReceived | TransferFailed | TransferFreed) -> None:
        self.events += self.scheduler.transfer(event, self.now)
        self.ask()

    def _carry_out(self, plan: StepPlan) -> None:
        assert plan.rows == 0
        encoded = [op for op in plan.ops if isinstance(op, Encode)]
        patches = [op.grid[0] * op.grid[1] * op.grid[2] for op in encoded]
        assert len(encoded) <= self.limits.encode_items
        assert sum(patches) <= self.limits.encode_patches or len(encoded) == 1
        for op in plan.ops:
            if isinstance(op, Encode):
                name = op.pixels[0]
                assert len(ids(op.blocks)) == self.limits.blocks_of(op.count)
                self._write(ids(op.blocks), None if name in self.bad else bytes([name]))
            elif isinstance(op, MoveMedia):
                near, far = ids(op.blocks), ids(op.host)
                if op.up:
                    for block, source in zip(near, far, strict=True):
                        self._write((block,), self.host[source])
                else:
                    for block, target in zip(near, far, strict=True):
                        self.host[target] = self.device[block]
            else:
                assert isinstance(op, SendMedia)
                self._send(op)

    def _write(self, blocks: tuple[int, ...], label: bytes | None) -> None:
        for block in blocks:
            readers = [key for key, far in self.transfers.items() if far.sent and block in far.sent]
            assert not readers, f"block {block} is written while {readers} read it"
            assert 0 < block <= self.limits.blocks
            self.device[block] = label

    def _send(self, op: SendMedia) -> None:
        far = self.transfers.get(op.key)
        assert far is not None
        assert far.bound
        assert far.sent is None
        far.sent = ids(op.blocks)
        assert op.count == far.count
        labels = {self.device[block] for block in far.sent}
        if labels == {None}:
            far.failing = far.failing or ImageFailed("it is bad").info()
        else:
            assert labels == {bytes([self.names[op.key]])}


def ids(blocks: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blocks, "<i4").tolist())


def play(world: World, seed: int, sequences: int = 25, faults: bool = True) -> None:
    """Run a random life: submits, reservations, steps, receptions, faults and aborts, in any order."""
    source = random.Random(seed)
    names = source.choice([6, 40])
    most = world.limits.blocks * BLOCK
    left = sequences
    for _ in range(100_000):
        if not left and not world.transfers and not world.plans and not world.scheduler.has_work():
            return
        # Repeated names are more likely. Faults and aborts stay rare, so that transfers complete.
        deeds = ["launch", "launch", "commit", "commit", "bind", "bind", "land", "land", "free"]
        if left:
            deeds += ["submit", "submit"]
        if faults:
            deeds += ["fail"] * (source.random() < 0.2) + ["abort"] * (source.random() < 0.1)
        deed = source.choice(deeds)
        keys = list(world.transfers)
        if deed == "submit":
            images = []
            for _ in range(source.randint(1, 4)):
                name = source.randrange(names)
                images.append((name, min(1 + (name * 7) % 17, most)))
            world.submit(submit(1000 - left, images, priority=source.choice([0, 0, 0, -1, 1])))
            left -= 1
        elif deed == "launch":
            world.launch()
        elif deed == "commit" and world.plans:
            world.commit()
        elif deed == "bind" and (
            open_ := [k for k in keys if not (f := world.transfers[k]).bound and not f.failing]
        ):
            key = source.choice(open_)
            world.bind(key, world.transfers[key].count if source.random() < 0.15 else 0)
        elif deed == "land" and (done := [key for key in keys if world.can_land(key)]):
            world.land(source.choice(done))
        elif deed == "fail" and (live := [key for key in keys if not world.transfers[key].reported]):
            world.fail(source.choice(live))
        elif deed == "free":
            for key in keys:
                far = world.transfers[key]
                if far.failing is not None and not far.reported:
                    world.fail(key)
                elif far.reported and source.random() < 0.5:
                    world.free(key)
        elif deed == "abort" and keys:
            world.finish(source.choice(keys).transfer // 100)
    raise AssertionError("it goes on for ever")
