"""The scheduler as the step loop needs it: drafts of plans frozen once, plans of updates alone, blocked
work."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Output, Rig
from weft.common.errors import EngineDead
from weft.kv.cache_groups import FullGroup
from weft.scheduler.scheduler import BLOCKED_S, MAX_EMPTY_PLANS
from weft.scheduler.sequence import Blocked, BlockedOnFirstSample, Waiting
from weft.types.messages import Submit
from weft.types.plan import Agreement, AppendBlocks, Rebalance, column

FAR = 1e9
"""A deadline that never passes."""


def started(**section: object) -> Rig:
    rig = Rig(kv_config(), 1, **section)
    rig.submit(submit(0, [1, 2, 3], max_tokens=9))
    rig.step()
    return rig


def listened(rig: Rig, sequence: int, **more: object) -> Submit:
    """Return a Submit, and register the sequence with the rig."""
    one = submit(sequence, [5, 2, 3], max_tokens=4, **more)
    rig.outputs[sequence] = Output(one)
    return one


# ---- build and freeze


def test_fields_set_on_a_builder_are_in_its_plan() -> None:
    rig = started()
    builder = rig.scheduler.build(0.0)
    assert builder is not None
    assert (builder.rows, builder.tokens) == (1, 1)
    assert rig.scheduler.in_flight == 0
    builder.micro_batches, builder.rebalance, builder.agreed = 2, True, Agreement(wave=1, padded_tokens=1)
    plan = rig.scheduler.freeze(builder)
    assert (plan.micro_batches, plan.agreed, plan.ops[-1]) == (2, builder.agreed, Rebalance())
    assert plan.decode is builder.decode
    assert list(rig.scheduler._state.in_flight) == [plan]
    assert rig.scheduler._state.in_flight[0] is plan


def test_a_builder_is_frozen_once_and_before_the_next() -> None:
    rig = started()
    builder = rig.scheduler.build(0.0)
    assert builder is not None
    for another in (rig.scheduler.build, lambda _: rig.scheduler.idle()):
        with pytest.raises(EngineDead, match="never frozen"):
            another(0.0)
    rig.scheduler.freeze(builder)
    with pytest.raises(EngineDead, match="built last"):
        rig.scheduler.freeze(builder)


def test_only_the_plan_that_ran_commits() -> None:
    """A copy of the plan, equal in every column, is refused."""
    rig = started()
    plan = rig.plan()
    assert plan is not None
    _, result = rig.in_flight[0]
    with pytest.raises(EngineDead, match="in plan order"):
        rig.scheduler.commit(replace(plan, micro_batches=2), result, 0.0)
    rig.drain()
    rig.check_outputs()


# ---- slot updates alone


def test_ops_without_rows_are_a_plan_like_any_other() -> None:
    rig = started(max_num_seqs=2)
    rig.drain()
    assert rig.scheduler.plan(0.0) is None
    rig.scheduler.enqueue(Rebalance())
    assert rig.scheduler.has_work()
    steps = rig.scheduler.steps
    plan = rig.plan()
    assert plan is not None
    assert (plan.rows, plan.ops[-1]) == (0, Rebalance())
    rig.drain()
    assert (rig.scheduler.steps, rig.scheduler.stats().idle_steps) == (steps + 1, 1)
    rig.submit(submit(1, [4, 5], max_tokens=3))
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_an_op_keeps_its_slot_until_its_plan_has_committed() -> None:
    rig = Rig(kv_config(), 2)
    rig.submit(submit(0, [1, 2, 3], max_tokens=2))
    assert rig.plan() is not None
    assert rig.plan() is not None
    free = rig.scheduler.stats().free_slots
    rig.scheduler.enqueue(AppendBlocks(slot=0, kind=0, blocks=column([20])))
    rig.commit()
    plan = rig.plan()
    assert plan is not None
    assert (plan.rows, len(plan.ops)) == (0, 1)
    rig.commit()
    assert rig.outputs[0].finish == "length"
    assert rig.scheduler.stats().free_slots == free, "a plan in flight names the slot"
    rig.commit()
    assert rig.scheduler.stats().free_slots == free + 1
    rig.check_outputs()


def test_an_op_goes_with_its_sequence() -> None:
    rig = started()
    rig.scheduler.enqueue(AppendBlocks(slot=0, kind=0, blocks=column([20])))
    rig.finish(0)
    assert not rig.scheduler.has_work()
    assert rig.plan() is None
    rig.check_idle()


# ---- blocked sequences


def test_blocked_sequences_are_neither_work_nor_lack_of_progress() -> None:
    rig = Rig(kv_config(), 1)
    rig.scheduler.add(listened(rig, 0), 0.0, blocked=True)
    assert rig.scheduler.stats().waiting == 1
    for _ in range(2 * MAX_EMPTY_PLANS):
        assert not rig.scheduler.has_work()
        assert rig.plan() is None
    rig.scheduler.arrived(0)
    rig.scheduler.arrived(0)
    rig.scheduler.arrived(77)
    assert rig.scheduler.has_work()
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_others_pass_by_and_its_turn_is_kept() -> None:
    rig = Rig(kv_config(), 1, max_num_seqs=1)
    for number in range(3):
        rig.scheduler.add(listened(rig, number), 0.0, blocked=number == 0)
    rig.step()
    assert [s.id for s in rig.scheduler._state.running] == [1]
    rig.scheduler.arrived(0)
    assert [s.id for s in rig.scheduler._state.waiting] == [0, 2]
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_an_blocked_sequence_can_end_and_its_parallel_samples_go_on() -> None:
    rig = Rig(kv_config(), 1)
    for choice in range(3):
        rig.scheduler.add(listened(rig, choice, request=5, choice=choice), 0.0, blocked=choice < 2)
    states = [type(s.state) for s in rig.scheduler._state.live.values()]
    assert states == [Blocked, BlockedOnFirstSample, BlockedOnFirstSample]
    assert not rig.scheduler.has_work()
    rig.finish(0)
    assert type(rig.scheduler._state.live[1].state) is Blocked
    rig.scheduler.arrived(1)
    assert type(rig.scheduler._state.live[1].state) is Waiting
    rig.drain()
    assert {n: output.finish for n, output in rig.outputs.items()} == {0: "abort", 1: "length", 2: "length"}
    rig.check_idle()


def test_pinned_blocks_are_not_reused_after_a_loss() -> None:
    """Ranks are lost while an outside writer has pinned blocks. The blocks are not reused before the pin
    ends."""
    rig = Rig(kv_config(blocks=6, max_model_len=24), 1, max_num_seqs=2)
    rig.submit(submit(0, list(range(1, 12)), max_tokens=9))
    rig.step()
    scheduler = rig.scheduler
    kind = scheduler._state.caches.kinds[0]
    assert isinstance(kind, FullGroup)
    slot = scheduler._state.live[0].state.slot  # type: ignore[union-attr]
    held = list(kind._tables[slot].blocks)
    assert len(held) == 3
    for block in held:
        scheduler.pin(0, block, until=FAR)
    rig.plan()
    scheduler.requeue_all()
    rig.in_flight.clear()
    rig.runner = rig.runner.anew()
    assert scheduler.stats().free_blocks == (3,)
    taken = []
    for _ in range(3 * MAX_EMPTY_PLANS):  # the sequence needs more than three blocks
        plan = rig.plan()
        if plan is None:
            break
        taken += [b for op in plan.ops for b in getattr(op, "blocks", ())]
        rig.commit()
    assert not set(taken) & set(held)
    for _ in range(2 * MAX_EMPTY_PLANS):
        assert rig.plan() is None
        assert not scheduler.has_work()
    for block in held:
        scheduler.unpin(0, block)
        assert scheduler.has_work()
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


# ---- one rule of progress


def starved(until: float) -> tuple[Rig, list[int]]:
    """Return a rig whose only sequence lacks blocks, because enough blocks are pinned."""
    rig = Rig(kv_config(blocks=6, max_model_len=24), 1, max_num_seqs=2)
    rig.submit(submit(0, list(range(1, 12)), max_tokens=9))
    rig.step()
    kind = rig.scheduler._state.caches.kinds[0]
    assert isinstance(kind, FullGroup)
    held = list(kind._tables[rig.scheduler._state.live[0].state.slot].blocks)  # type: ignore[union-attr]
    for block in held:
        rig.scheduler.pin(0, block, until=until)
    rig.finish(0)
    rig.submit(submit(1, [9] * 19, max_tokens=4))
    return rig, held


def plan_for_ever(rig: Rig, now: float, ops: bool = False) -> None:
    """Plan repeatedly, as a loop does while the scheduler reports work."""
    for _ in range(3 * MAX_EMPTY_PLANS):
        rig.scheduler.expire(now)
        if ops:
            rig.scheduler.enqueue(Rebalance())
        if not rig.scheduler.has_work():
            continue
        plan = rig.scheduler.plan(now)
        if plan is not None:
            assert not plan.rows
            rig.scheduler.commit(plan, rig.runner.launch(plan), now)


def test_a_pin_excuses_a_lack_of_progress_until_its_deadline() -> None:
    rig, held = starved(until=10.0)
    plan_for_ever(rig, 9.0)
    assert not rig.scheduler.has_work()
    for block in held:
        rig.scheduler.unpin(0, block)
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_a_leaked_pin_does_not_hide_a_lack_of_progress() -> None:
    rig, _ = starved(until=10.0)
    plan_for_ever(rig, 9.0)
    with pytest.raises(EngineDead, match="no progress"):
        plan_for_ever(rig, 10.0)


def test_a_pin_on_an_unneeded_block_excuses_no_lack_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence waits for a slot that is never freed. The pinned block does not excuse the stall."""
    rig = started()
    kind = rig.scheduler._state.caches.kinds[0]
    assert isinstance(kind, FullGroup)
    rig.scheduler.pin(0, kind._tables[0].blocks[0], until=10.0)
    rig.finish(0)
    rig.submit(submit(1, [4, 5]))
    monkeypatch.setattr(rig.scheduler._state.slots, "available", lambda: 0)
    with pytest.raises(EngineDead, match="no progress"):
        plan_for_ever(rig, 9.0)


def test_parallel_samples_of_one_whose_wait_ended_are_looked_at_beside_a_pin() -> None:
    rig, _ = starved(until=100.0)
    rig.scheduler.add(listened(rig, 10, request=5), 0.0, blocked=True, until=8.0)
    rig.scheduler.add(listened(rig, 11, request=5, choice=1), 0.0)
    plan_for_ever(rig, 7.0)
    assert not rig.scheduler.has_work()
    assert [event.sequence for event in rig.scheduler.expire(8.0)] == [10]
    assert rig.scheduler.has_work()


def test_plans_of_ops_alone_are_no_progress() -> None:
    rig, _ = starved(until=0.0)
    with pytest.raises(EngineDead, match="no progress"):
        plan_for_ever(rig, 1.0, ops=True)


def test_blocked_sequences_have_a_deadline() -> None:
    rig = Rig(kv_config(), 1)
    rig.scheduler.add(listened(rig, 0), 5.0, blocked=True, until=8.0)
    rig.scheduler.add(listened(rig, 1), 5.0, blocked=True)
    rig.scheduler.add(listened(rig, 2), 5.0, blocked=True, until=6.0)
    assert rig.scheduler.blocked
    rig.scheduler.arrived(2)
    assert rig.scheduler.expire(7.9) == []
    (event,) = rig.scheduler.expire(8.0)
    assert (event.sequence, event.finish) == (0, "error")
    assert event.error is not None
    assert event.error.code == "deadline_exceeded"
    assert list(rig.scheduler._state.live) == [1, 2]
    assert [one.sequence for one in rig.scheduler.expire(5.0 + BLOCKED_S)] == [1]
    rig.outputs.pop(0)
    rig.outputs.pop(1)
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    assert not rig.scheduler.blocked
