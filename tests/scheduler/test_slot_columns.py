"""Rows handled together as columns give the same results as the same rows one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.scheduler.fake_runner import alone, kv_config, submit
from tests.scheduler.harness import Rig, random_run
from tests.support.slow import mostly_slow
from weft.kv.caches import Caches
from weft.scheduler.plan_builder import DecodeRows, PlanBuilder
from weft.scheduler.sequence import Running
from weft.scheduler.slot_columns import MAX_STOPS, SlotColumns
from weft.types.messages import TokenEvent
from weft.types.plan import AppendBlocks, AppendEach, SlotUpdate, StepPlan, column


def appended(ops: tuple[SlotUpdate, ...]) -> dict[tuple[int, int], int]:
    """Return the number of appended blocks of a plan by (slot, KV cache group)."""
    counts: dict[tuple[int, int], int] = {}
    for op in ops:
        if isinstance(op, AppendEach):
            for slot in op.slots.tolist():
                counts[slot, op.kind] = counts.get((slot, op.kind), 0) + 1
        elif isinstance(op, AppendBlocks):
            counts[op.slot, op.kind] = counts.get((op.slot, op.kind), 0) + len(op.blocks)
    return counts


def shape(plan: StepPlan) -> list[Any]:
    segments = [[c.tolist() for c in (s.slot, s.gen, s.start, s.count)] for s in (plan.prefill, plan.decode)]
    return [*segments, appended(plan.ops)]


def outcome(rig: Rig) -> list[Any]:
    """Return all plans, outputs and statistics of a rig."""
    output = [(t.tokens, t.logprob_ids, t.finish, t.stop_id, t.num_cached) for t in rig.outputs.values()]
    return [output, [shape(plan) for plan in rig.plans], rig.scheduler.stats()]


@mostly_slow("seed", range(12), 5)
def test_growing_together_or_one_by_one_makes_the_same_plans(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without drafts: rows give up drafts before they grow one by one.
    together = outcome(random_run(seed, 2, drafts=False))
    monkeypatch.setattr(Caches, "grow", lambda self, slots, upto: None)
    assert outcome(random_run(seed, 2, drafts=False)) == together


def busy_run() -> tuple[Rig, list[list[TokenEvent]]]:
    """Run a load without evictions, because the order within a commit decides which block is evicted
    first."""
    rig = Rig(kv_config(blocks=400, window=6, window_blocks=400), 2, max_num_seqs=6)
    heard: list[list[TokenEvent]] = []
    for number in range(30):
        stop = (number % 50, (number + 7) % 50)
        rig.submit(submit(number, [number] * (3 + number % 5), max_tokens=5 + number % 20, stop_ids=stop))
    hear = rig.collect

    def listening(events: list[TokenEvent]) -> None:
        heard.append(events)
        hear(events)

    rig.collect = listening  # type: ignore[method-assign]
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    return rig, heard


def test_quiet_rows_tell_what_they_would_tell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, heard = busy_run()
    set_stops = SlotColumns.set_stops
    monkeypatch.setattr(
        SlotColumns, "set_stops", lambda self, slot, ids, quiet: set_stops(self, slot, ids, False)
    )
    loud, heard_loud = busy_run()
    assert heard == heard_loud
    assert outcome(rig) == outcome(loud)


def test_a_dropped_row_takes_its_growth_with_it() -> None:
    rig = Rig(kv_config(), 1)
    for number in range(2):
        rig.submit(submit(number, [number, 1, 2], max_tokens=9))
    rig.step()
    state = rig.scheduler._state
    sequence = state.live[0]
    assert isinstance(sequence.state, Running)
    builder = PlanBuilder(1, 10, state.columns)
    builder.grow([AppendEach(kind=0, slots=column([0, 1]), blocks=column([8, 9]))])
    builder.grow([AppendBlocks(slot=0, kind=0, blocks=column([10]))])
    builder.add_decode(DecodeRows.plain(np.array([0, 1])))
    assert (builder.rows, builder.budget) == (2, 8)
    builder.drop(sequence, sequence.state)
    assert (builder.rows, builder.budget) == (1, 9)
    plan = builder.close().freeze([])
    assert plan.decode.slot.tolist() == [1]
    assert appended(plan.ops) == {(1, 0): 1}


def test_more_stops_than_a_column_pins() -> None:
    whole, _ = alone(submit(0, [7, 8], max_tokens=30), 48)
    others = [token for token in range(50) if token not in whole]
    stops = tuple(sorted([*others[: MAX_STOPS + 2], whole[9]]))
    rig = Rig(kv_config(), 2)
    rig.submit(submit(0, [7, 8], max_tokens=30, stop_ids=stops))
    rig.drain()
    rig.check_outputs()
    assert rig.outputs[0].finish == "stop"


def test_all_rows_grow_in_one_op() -> None:
    rig = Rig(kv_config(blocks=100), 1, max_num_batched_tokens=64)
    for number in range(6):
        rig.submit(submit(number, [number, 1, 2], max_tokens=9))
    rig.step()
    rig.step()
    plan = rig.plan()
    assert plan is not None
    assert plan.decode.start.tolist() == [4] * 6
    (op,) = plan.ops
    assert isinstance(op, AppendEach)
    assert op.slots.tolist() == list(range(6))
    assert op.blocks.tolist() == list(range(7, 13))


def test_an_op_without_a_slot() -> None:
    op = AppendEach(kind=1, slots=column([3, 5]), blocks=column([8, 9]))
    assert op.without(4) is op
    rest = op.without(3)
    assert rest is not None
    assert (rest.kind, rest.slots.tolist(), rest.blocks.tolist()) == (1, [5], [9])
    assert rest.without(5) is None


def test_a_slot_without_a_sequence_is_nobodys() -> None:
    rig = Rig(kv_config(), 1)
    rig.submit(submit(0, [1, 2], max_tokens=4))
    rig.step()
    state = rig.scheduler._state
    assert state.columns.gen[0] == 1
    assert state.order().tolist() == [0]
    assert state.in_slot[0].id == 0
    rig.finish(0)
    assert state.columns.gen[0] == 0
    assert state.order().tolist() == []
    assert state.in_slot[0] is None
    assert not np.any(state.columns.gen)
