"""One block for each of many slots in one update gives the same tables as one update for each slot."""

from __future__ import annotations

import pytest
import torch

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.spec import CacheSpec
from weft.runner.slot_state import SlotState
from weft.types.plan import AllocSlot, AppendBlocks, AppendEach, column
from weft.types.sampling import TokenParams


def make_state() -> SlotState:
    """Return four slots, three with sequences, and tables of at most six entries."""
    cache = CacheSpec(kind="full", layers=(0,), kv_heads=1, head_dim=4)
    kv = KVConfig(
        pools=(PoolSpec(cache=cache, block_size=4, num_blocks=20),) * 2,
        block_size=4,
        enable_prefix_caching=True,
        max_model_len=16,
        num_slots=4,
    )
    state = SlotState(kv, torch.device("cpu"))
    for slot in range(3):
        ids = column([5, 6, 7])
        state.apply(
            AllocSlot(
                slot=slot,
                gen=1,
                choice=0,
                seed=0,
                params=TokenParams(),
                num_prompt=3,
                num_cached=0,
                token_ids=ids,
            )
        )
    return state


def each(slots: list[int], blocks: list[int], kind: int = 0) -> AppendEach:
    return AppendEach(kind=kind, slots=column(slots), blocks=column(blocks))


def test_each_slot_gets_its_block_at_its_own_end() -> None:
    one, many = make_state(), make_state()
    for state in (one, many):
        state.apply(AppendBlocks(slot=1, kind=0, blocks=column([9, 8])))
    for slot, block in ((2, 4), (0, 5), (1, 6)):
        one.apply(AppendBlocks(slot=slot, kind=0, blocks=column([block])))
    many.apply(each([2, 0, 1], [4, 5, 6]))
    many.apply(each([1], [7], kind=1))
    one.apply(AppendBlocks(slot=1, kind=1, blocks=column([7])))
    assert many.tables[0][1].tolist() == [9, 8, 6, 0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(one.tables, many.tables, strict=True))
    assert (one._entries == many._entries).all()


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        (each([0, 3], [1, 2]), "which is free|that is free"),
        (each([0, 4], [1, 2]), "outside the table"),
        (each([-1], [1]), "outside the table"),
        (each([1, 1], [1, 2]), "twice"),
    ],
)
def test_an_op_that_contradicts_the_table_stops_the_group(op: AppendEach, wrong: str) -> None:
    with pytest.raises(EngineDead, match=wrong):
        make_state().apply(op)


def test_overflow_stops_the_group() -> None:
    state = make_state()
    for _ in range(6):
        state.apply(each([0, 1], [1, 2]))
    with pytest.raises(EngineDead, match="overflows"):
        state.apply(each([2, 0], [3, 4]))
