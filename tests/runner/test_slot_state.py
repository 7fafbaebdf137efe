"""The table on the device follows slot updates. A plan that contradicts the table stops the group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.spec import CacheSpec
from weft.runner.expert_routes import ExpertRoutes
from weft.runner.sampling.slot_params import SlotParams
from weft.runner.slot_state import SlotState
from weft.types.plan import AllocSlot, AppendBlocks, FreeSlot, Segment, StepPlan, column
from weft.types.sampling import TokenParams


@pytest.fixture
def state() -> SlotState:
    return make_state(torch.device("cpu"))


def make_state(device: torch.device) -> SlotState:
    cache = CacheSpec(kind="full", layers=(0,), kv_heads=1, head_dim=4)
    kv = KVConfig(
        pools=(PoolSpec(cache=cache, block_size=4, num_blocks=8),),
        block_size=4,
        enable_prefix_caching=True,
        max_model_len=16,
        num_slots=2,
    )
    return SlotState(kv, device)


def alloc(slot: int = 0, gen: int = 1, **more: Any) -> AllocSlot:
    fields: dict[str, Any] = {
        "choice": 0,
        "seed": 0,
        "params": TokenParams(),
        "num_prompt": 3,
        "num_cached": 0,
    }
    return AllocSlot(slot=slot, gen=gen, **{**fields, "token_ids": column([5, 6, 7]), **more})


def row(start: int, count: int, slot: int = 0, gen: int = 1) -> Segment:
    one = column([1])
    return Segment(
        slot=column([slot]),
        gen=column([gen]),
        start=column([start]),
        count=column([count]),
        logits=one,
        sample=one,
        next_k=column([0]),
    )


def test_a_flag_of_all_slots_follows_each_slot(state: SlotState) -> None:
    """A flag skips a look at the rows of a step, so a flag that is not set would change tokens, and a flag
    that is not cleared would cost time in every later step."""
    free = FreeSlot(slot=1, gen=1)
    assert state.adapters(np.array([0, 1])) == ()
    state.apply(alloc(0))
    state.apply(alloc(1, adapter=2))
    assert state.adapters(np.array([0, 1])) == (2,)
    assert state.adapters(np.array([0])) == ()
    state.apply(free)
    assert not state._adapted
    state.apply(alloc(1, gen=2))
    assert state.adapters(np.array([0, 1])) == ()
    assert state.places[1] == -1

    # One step may end a sequence with an adapter and put another one into the slot.
    state.apply(FreeSlot(slot=1, gen=2))
    state.apply(alloc(1, gen=3, adapter=3))
    assert state.adapters(np.array([0, 1])) == (3,)
    state.apply(FreeSlot(slot=1, gen=3))
    state.apply(alloc(1, gen=4, adapter=1))
    assert state.adapters(np.array([0, 1])) == (1,)
    assert state.places[1] == 1
    state.clear()
    assert state.adapters(np.array([0, 1])) == ()
    # The slot has the place already.
    state.apply(alloc(1, gen=5, adapter=1))
    assert state.adapters(np.array([1])) == (1,)

    params = SlotParams(2, 60, torch.device("cpu"))
    params.alloc(alloc(0))
    params.alloc(alloc(1, params=TokenParams(logprobs=2)))
    assert params.draws(np.array([0]))
    assert not params.draws(np.array([0, 1]))
    params.free(1)
    assert params.all_direct
    params.alloc(alloc(1, params=TokenParams(presence_penalty=0.5)))
    assert not params.draws(np.array([1]))
    params.clear()
    assert params.all_direct

    routes = ExpertRoutes(2, 4, torch.device("cpu"))
    plan = StepPlan(step=0, decode=row(3, 1, slot=1))
    assert not routes.wants(plan)
    routes.apply([alloc(1, routes=True)])
    assert routes.wants(plan)
    routes.apply([free])
    assert not routes.wants(plan)
    assert not routes._any
    routes.apply([alloc(1, routes=True)])
    routes.clear()
    assert not routes.wants(plan)
    assert not routes._any


def test_rows_are_checked_again_after_each_slot_update(state: SlotState) -> None:
    """Rows that repeat are checked against a stored answer, which every slot update and every other column
    drops."""
    state.apply(alloc(0))
    state.apply(AppendBlocks(slot=0, kind=0, blocks=column([3])))
    state.validate(row(3, 1))
    with pytest.raises(EngineDead, match="block table"):
        state.validate(row(4, 1))
    with pytest.raises(EngineDead, match="block table"):
        state.validate(row(3, 2))
    state.apply(AppendBlocks(slot=0, kind=0, blocks=column([4])))
    state.validate(row(3, 2))
    with pytest.raises(EngineDead, match="without its sequence"):
        state.validate(row(3, 2, gen=2))
    state.validate(row(3, 2))
    state.apply(FreeSlot(slot=0, gen=1))
    with pytest.raises(EngineDead, match="without its sequence"):
        state.validate(row(3, 2))
    state.apply(alloc(0))
    state.apply(AppendBlocks(slot=0, kind=0, blocks=column([3])))
    state.validate(row(3, 1))
    state.clear()
    with pytest.raises(EngineDead, match="without its sequence"):
        state.validate(row(3, 1))


def test_alloc_writes_history_and_lengths(state: SlotState) -> None:
    state.apply(alloc(num_cached=2))
    assert state.history[0, :3].tolist() == [5, 6, 7]
    assert (state.num_computed[0].item(), state.num_prompt[0].item()) == (2, 3)


def test_tables_grow_and_start_over_with_the_next_sequence(state: SlotState) -> None:
    state.apply(alloc())
    state.apply(AppendBlocks(slot=0, kind=0, blocks=column([3])))
    state.apply(AppendBlocks(slot=0, kind=0, blocks=column([1, 2])))
    assert state.tables[0][0, :3].tolist() == [3, 1, 2]
    state.apply(FreeSlot(slot=0, gen=1))
    state.apply(alloc(gen=2))
    state.apply(AppendBlocks(slot=0, kind=0, blocks=column([7])))
    assert state.tables[0][0, 0].item() == 7
    assert not state.tables[0][0, 1:].any(), "blocks of the sequence before"
    state.validate(row(0, 4, gen=2))
    with pytest.raises(EngineDead, match="beyond its block table"):
        state.validate(row(0, 5, gen=2))


@pytest.mark.requirement("A6")
@pytest.mark.parametrize(
    ("ops", "what"),
    [
        ([alloc(), alloc(gen=2)], "while generation 1 is in it"),
        ([FreeSlot(slot=0, gen=1)], "has another sequence or none"),
        ([alloc(), FreeSlot(slot=0, gen=2)], "has another sequence or none"),
        ([AppendBlocks(slot=1, kind=0, blocks=column([1]))], "which is free"),
        ([alloc(slot=2)], "the table has 2"),
        ([alloc(slot=-1)], "the table has 2"),
        ([alloc(token_ids=column(np.arange(17)))], "invalid lengths"),
        ([alloc(num_prompt=4)], "invalid lengths"),
        ([alloc(num_cached=3)], "invalid lengths"),
        ([alloc(), AppendBlocks(slot=0, kind=0, blocks=column([1] * 7))], "overflows"),
    ],
)
def test_a_contradicting_op_stops_the_group(state: SlotState, ops: list[Any], what: str) -> None:
    *before, last = ops
    for op in before:
        state.apply(op)
    with pytest.raises(EngineDead, match=what):
        state.apply(last)


@pytest.mark.parametrize(
    ("segment", "what"),
    [
        (row(0, 1, slot=2), "outside the table"),
        (row(0, 1, slot=-1), "outside the table"),
        (row(0, 1, slot=1), "without its sequence"),
        (row(0, 1, gen=2), "without its sequence"),
        (row(3, 2), "beyond its block table"),
    ],
)
def test_a_contradicting_row_stops_the_group(state: SlotState, segment: Segment, what: str) -> None:
    state.apply(alloc())
    state.apply(AppendBlocks(slot=0, kind=0, blocks=column([1])))
    state.validate(row(0, 4))
    with pytest.raises(EngineDead, match=what):
        state.validate(segment)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_ops_do_not_wait_for_the_gpu() -> None:
    state = make_state(torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.apply(alloc(num_cached=2))
        state.apply(AppendBlocks(slot=0, kind=0, blocks=column([3])))
        state.apply(FreeSlot(slot=0, gen=1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.history[0, :3].tolist() == [5, 6, 7]
    assert state.tables[0][0, 0].item() == 3
