"""The digest of a slot table: equal for equal tables, other for others."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from weft.common.errors import EngineDead
from weft.kv.digest import SlotDigest
from weft.types.plan import (
    AllocSlot,
    AppendBlocks,
    AppendEach,
    BindMedia,
    Encode,
    FreeSlot,
    MoveMedia,
    SaveState,
    Segment,
    SlotUpdate,
    StepPlan,
    column,
)
from weft.types.sampling import TokenParams

SLOTS, KINDS = 4, 2
ONE, TWO = (column([block]).tobytes() for block in (1, 2))


def alloc(slot: int, gen: int = 1, seed: int = 0) -> AllocSlot:
    return AllocSlot(
        slot=slot,
        gen=gen,
        choice=0,
        seed=seed,
        params=TokenParams(),
        num_prompt=3,
        num_cached=0,
        token_ids=column([5, 6, 7]),
    )


def rows(slots: list[int], start: int = 3, gen: int = 1) -> Segment:
    many = len(slots)
    ones = column([1] * many)
    return Segment(
        slot=column(slots),
        gen=column([gen] * many),
        start=column([start + slot for slot in slots]),
        count=ones,
        logits=ones,
        sample=ones,
        next_k=column([0] * many),
    )


def blocks(slot: int, ids: list[int], kind: int = 0) -> AppendBlocks:
    return AppendBlocks(slot=slot, kind=kind, blocks=column(ids))


def test_images_are_in_it_without_their_pixels() -> None:
    def told(*ops: SlotUpdate) -> int:
        return digest(StepPlan(step=0, ops=(alloc(0), *ops), prefill=rows([0], 0)))

    image = Encode(blocks=ONE, count=1, grid=(1, 2, 2), pixels=b"a" * 48)
    bind = BindMedia(slot=0, start=0, count=1, blocks=ONE)
    same = Encode(blocks=ONE, count=1, grid=(1, 2, 2), pixels=b"b" * 48)
    assert told(image, bind) == told(same, bind)
    others = [
        told(image),
        told(bind),
        told(image, BindMedia(slot=0, start=1, count=1, blocks=ONE)),
        told(Encode(blocks=TWO, count=1, grid=(1, 2, 2), pixels=b""), bind),
        told(image, MoveMedia(blocks=ONE, host=TWO, up=False)),
    ]
    assert len({told(image, bind), *others}) == 6
    with pytest.raises(EngineDead, match="free"):
        told(BindMedia(slot=1, start=0, count=1, blocks=ONE))


def digest(*plans: StepPlan) -> int:
    kept = SlotDigest(SLOTS, KINDS)
    for plan in plans:
        last = kept.take(plan)
    return last


def plan(*ops: SlotUpdate, step: int = 0, **segments: Segment) -> StepPlan:
    return StepPlan(step=step, ops=ops, **segments)


BASE = plan(alloc(0), alloc(1), blocks(0, [3]), blocks(1, [4]), decode=rows([0, 1]))


def test_it_is_a_function_of_the_plans() -> None:
    assert digest(BASE) == digest(BASE)
    assert 0 <= digest(BASE) < 1 << 64


def test_blocks_in_one_op_or_many_are_the_same_tables() -> None:
    one = plan(alloc(0), alloc(1), blocks(0, [3, 8]), blocks(1, [4, 9]), decode=rows([0, 1]))
    each = AppendEach(kind=0, slots=column([0, 1]), blocks=column([8, 9]))
    other = plan(alloc(0), alloc(1), blocks(0, [3]), blocks(1, [4]), each, decode=rows([0, 1]))
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    "other",
    [
        plan(alloc(0), alloc(1), blocks(0, [3]), blocks(1, [4]), decode=rows([1, 0])),
        plan(alloc(0), alloc(1), blocks(0, [3]), blocks(1, [4]), decode=rows([0, 1], start=4)),
        plan(alloc(0), alloc(1), blocks(0, [3]), blocks(1, [4]), prefill=rows([0, 1])),
        plan(alloc(0), alloc(1), blocks(0, [3]), blocks(1, [4]), decode=rows([0])),
        plan(alloc(0), alloc(1), blocks(0, [4]), blocks(1, [3]), decode=rows([0, 1])),
        plan(alloc(0), alloc(1), blocks(0, [3], kind=1), blocks(1, [4]), decode=rows([0, 1])),
        plan(alloc(0), alloc(1), blocks(0, [0, 3]), blocks(1, [4]), decode=rows([0, 1])),
        plan(alloc(0), alloc(1, seed=1), blocks(0, [3]), blocks(1, [4]), decode=rows([0, 1])),
        plan(alloc(0), alloc(1), alloc(2), blocks(0, [3]), blocks(1, [4]), decode=rows([0, 1])),
        replace(BASE, step=1),
        replace(BASE, ops=(*BASE.ops, SaveState(slot=0, kind=1, block=2))),
    ],
)
def test_different_tables_have_different_digests(other: StepPlan) -> None:
    assert digest(other) != digest(BASE)


def test_a_difference_shows_at_every_later_step() -> None:
    later = [plan(step=step, decode=rows([0], start=3 + step)) for step in range(1, 5)]
    spoiled = replace(BASE, ops=(*BASE.ops, blocks(1, [9])))
    for upto in range(1, 5):
        assert digest(BASE, *later[:upto]) != digest(spoiled, *later[:upto])


def test_a_sequence_that_left_leaves_no_trace() -> None:
    gone = [BASE, plan(FreeSlot(slot=1, gen=1), step=1)]
    alone = [plan(alloc(0), blocks(0, [3]), decode=rows([0])), plan(step=1)]
    assert digest(*gone) == digest(*alone)


def test_cleared_is_as_new() -> None:
    kept = SlotDigest(SLOTS, KINDS)
    kept.take(BASE)
    kept.clear()
    assert kept.take(BASE) == digest(BASE)


@pytest.mark.requirement("A6")
def test_occupied_slots_can_be_allocated_only_when_freed_in_the_same_plan() -> None:
    kept = SlotDigest(SLOTS, KINDS)
    kept.take(BASE)
    kept.take(plan(FreeSlot(slot=0, gen=1), alloc(0, gen=2), step=1, prefill=rows([0], gen=2)))
    with pytest.raises(EngineDead, match="slot 1 is allocated while generation 1 is in it"):
        kept.take(plan(alloc(1, gen=2), FreeSlot(slot=1, gen=1), step=2))


@pytest.mark.parametrize(
    "wrong",
    [
        plan(alloc(4)),
        plan(alloc(-1)),
        plan(FreeSlot(slot=9, gen=1)),
        plan(FreeSlot(slot=3, gen=1)),
        plan(FreeSlot(slot=0, gen=2)),
        plan(blocks(2, [1])),
        plan(blocks(0, [1], kind=2)),
        plan(AppendEach(kind=0, slots=column([0, 3]), blocks=column([1, 2]))),
        plan(AppendEach(kind=0, slots=column([0, 0]), blocks=column([1, 2]))),
        plan(decode=rows([0, 2])),
        plan(decode=rows([0, -1])),
        plan(decode=rows([4])),
        plan(prefill=rows([0], gen=2)),
    ],
)
def test_plans_that_contradict_the_table_are_refused(wrong: StepPlan) -> None:
    kept = SlotDigest(SLOTS, KINDS)
    kept.take(BASE)
    with pytest.raises(EngineDead):
        kept.take(replace(wrong, step=1))
