"""Random loads over an engine and three workers: tables never diverge, and planted faults are detected."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from tests.engine.group_rig import TIMEOUT, GroupRig, Ranks
from tests.scheduler.harness import next_turn, random_bases, random_rig, random_submits
from weft.group.types import GroupLost
from weft.parallel.loopback import LinkFault
from weft.types import frames as f
from weft.types.plan import AppendBlocks, AppendEach, FreeSlot, Segment, StepPlan, column


def make_rig(rng: random.Random, depth: int) -> GroupRig:
    rig = random_rig(rng, depth, make=GroupRig)
    rig.runner.right = rng.choice([0.0, 0.5, 0.8, 1.0])
    rig.join(Ranks(rig.kv))
    rig.ranks.up()
    return rig


class Load:
    """Random requests for a rig, and iterations of the rig's engine."""

    def __init__(self, rng: random.Random, rig: GroupRig) -> None:
        self.rng, self.rig = rng, rig
        self.bases = random_bases(rng)
        self.requests = 0

    def turn(self) -> None:
        rng, rig = self.rng, self.rig
        if rng.random() < 0.3 and len(rig.outputs) < 40:
            turn = [next_turn(rng, rig)] if rig.outputs and rng.random() < 0.5 else []
            for one in random_submits(rng, len(rig.outputs), self.requests, turn or self.bases):
                rig.submit(one)
            self.requests += 1
        if rng.random() < 0.05 and rig.outputs:
            rig.finish(rng.randrange(len(rig.outputs)))
        if rng.random() < 0.5 and len(rig.in_flight) < rig.depth:
            rig.plan()
        elif rig.in_flight:
            rig.commit()


@pytest.mark.requirement("A3")
@pytest.mark.parametrize("least", [1_500, pytest.param(10_000, marks=pytest.mark.grid)])
def test_random_steps_and_no_table_diverges(least: int) -> None:
    steps = seed = preempted = hits = accepted = 0
    while steps < least:
        rng = random.Random(seed)
        rig = make_rig(rng, 1 + seed % 2)
        load = Load(rng, rig)
        for _ in range(150):
            load.turn()
            if rng.random() < 0.4:
                rig.ranks.check_equal()
        rig.drain()
        rig.ranks.check_equal()
        rig.check_outputs()
        stats = rig.scheduler.stats()
        steps += stats.steps
        preempted += stats.preemptions
        hits += stats.prefix_hits
        accepted += sum(stats.drafts_accepted)
        rig.ranks.engine.close()
        rig.ranks.settle()
        assert all(worker.stopped for worker in rig.ranks.workers.values())
        assert all(runner.closed for runner in rig.ranks.runners.values())
        seed += 1
    assert min(preempted, hits, accepted) > 0


def swap_rows(plan: StepPlan, rng: random.Random) -> StepPlan | None:
    """Swap two rows. Return None if the plan has too few rows."""
    for name in ("decode", "prefill"):
        segment: Segment = getattr(plan, name)
        if segment.rows < 2:
            continue
        one, other = rng.sample(range(segment.rows), 2)
        order = np.arange(segment.rows)
        order[[one, other]] = order[[other, one]]
        columns = {field: column(getattr(segment, field)[order]) for field in segment.__struct_fields__}
        return replace(plan, **{name: replace(segment, **columns)})
    return None


def swap_slots(plan: StepPlan, rng: random.Random) -> StepPlan | None:
    """Swap slot and generation of two decode rows, and keep all other columns."""
    rows = plan.decode
    for one in range(1, rows.rows):
        order = np.arange(rows.rows)
        order[[0, one]] = order[[one, 0]]
        if rows.start[0] != rows.start[one] or rows.count[0] != rows.count[one]:
            swapped = replace(rows, slot=column(rows.slot[order]), gen=column(rows.gen[order]))
            return replace(plan, decode=swapped)
    return None


def stale_slot(plan: StepPlan, rng: random.Random) -> StepPlan | None:
    """Remove the FreeSlot of a sequence that has left."""
    frees = [op for op in plan.ops if isinstance(op, FreeSlot)]
    if not frees:
        return None
    gone = rng.choice(frees)
    return replace(plan, ops=tuple(op for op in plan.ops if op is not gone))


def stale_generation(plan: StepPlan, rng: random.Random) -> StepPlan | None:
    """Give a row the generation of the slot's previous sequence."""
    rows = plan.decode
    if not rows.rows:
        return None
    gen = rows.gen.copy()
    gen[rng.randrange(len(gen))] -= 1
    return replace(plan, decode=replace(rows, gen=column(gen)))


def other_block(plan: StepPlan, rng: random.Random) -> StepPlan | None:
    """Replace a block of the cache by another block."""
    for number, op in enumerate(plan.ops):
        if isinstance(op, AppendBlocks | AppendEach):
            blocks = op.blocks.copy()
            blocks[rng.randrange(len(blocks))] += 1
            ops = (*plan.ops[:number], replace(op, blocks=column(blocks)), *plan.ops[number + 1 :])
            return replace(plan, ops=ops)
    return None


def lost_op(plan: StepPlan, rng: random.Random) -> StepPlan | None:
    """Remove one slot update."""
    if not plan.ops:
        return None
    gone = rng.randrange(len(plan.ops))
    return replace(plan, ops=plan.ops[:gone] + plan.ops[gone + 1 :])


def outside(plan: StepPlan, rng: random.Random) -> StepPlan | None:
    """Let a row name a slot outside all tables."""
    rows = plan.decode
    if not rows.rows:
        return None
    slot = rows.slot.copy()
    slot[-1] = rng.choice([-1, 1000])
    return replace(plan, decode=replace(rows, slot=column(slot)))


def longer_row(plan: StepPlan, rng: random.Random) -> StepPlan | None:
    """Change the number of tokens of a prefill row."""
    rows = plan.prefill
    if not rows.rows:
        return None
    return replace(plan, prefill=replace(rows, count=column(rows.count + 1)))


class Plant:
    """Changes one StepFrame to one rank, the first possible frame from a given step on."""

    def __init__(
        self, spoil: Callable[[StepPlan, random.Random], StepPlan | None] | None, after: int
    ) -> None:
        self.spoil, self.after = spoil, after
        self.rng = random.Random(after)
        self.step: int | None = None

    def __call__(self, data: bytes) -> Sequence[bytes]:
        frame = f.decode_to_rank(data)
        if self.step is not None or not isinstance(frame, f.StepFrame) or frame.step < self.after:
            return [data]
        if self.spoil is None:
            self.step = frame.step
            return []
        plan = self.spoil(frame.plan, self.rng)
        if plan is None:
            return [data]
        self.step = frame.step
        return [f.encode(replace(frame, plan=plan))]


def turn(rig: GroupRig, load: Load | None) -> GroupLost | None:
    """Run one engine iteration, with new work if ``load`` is given. Return the loss of the group, or None."""
    try:
        load.turn() if load is not None else rig.step()
        if not rig.scheduler.has_work():
            rig.ranks.engine.settle()
    except GroupLost as lost:
        return lost
    return None


SPOILS = [
    None,
    swap_rows,
    swap_slots,
    stale_slot,
    stale_generation,
    other_block,
    lost_op,
    outside,
    longer_row,
]


@pytest.mark.slow
@pytest.mark.requirement("A7")
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__ if spoil else "lost_frame")
def test_planted_divergences_are_caught_and_the_group_goes_on(
    spoil: Callable[[StepPlan, random.Random], StepPlan | None] | None,
) -> None:
    caught = 0
    for seed in range(3):
        rng = random.Random(1000 + seed)
        rig = make_rig(rng, 1 + seed % 2)
        victim = rng.randint(1, 3)
        plant = Plant(spoil, after=rng.randint(0, 8))
        rig.ranks.net.plant(LinkFault(rig.ranks.peer(victim), to_rank=True, deed=plant))
        load, turns, began = Load(rng, rig), 0, rig.ranks.clock.now()
        while turns < 24 or rig.scheduler.has_work():
            turns += 1
            lost = turn(rig, load if turns < 24 else None)
            if lost is not None:
                assert plant.step is not None, f"nothing was planted: {lost}"
                assert lost.rank == victim
                assert rig.ranks.workers[victim].step < plant.step, "it computed on the wrong state"
                caught += 1
                rig.recover(lost)
        assert (plant.step is not None) == (rig.ranks.epoch == 1), "it was not caught, once"
        assert rig.ranks.clock.now() - began <= TIMEOUT
        rig.ranks.check_equal()
        rig.check_outputs()
        rig.check_idle()
    assert caught >= 1
