"""From plan to batch: values computed on the host, and values read on the device."""

from __future__ import annotations

import pytest
import torch

from tests.runner.test_slot_state import alloc
from weft.attention.base import Backends
from weft.attention.gqa.torch_backend import TorchAttention
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.spec import CacheSpec
from weft.runner.batch.batch import Batch, BatchBuilder
from weft.runner.batch.staging import StagingRing
from weft.runner.slot_state import SlotState
from weft.types.plan import AppendBlocks, Segment, StepPlan, column

CPU = torch.device("cpu")


KV = KVConfig(
    pools=(
        PoolSpec(
            cache=CacheSpec(kind="full", layers=(0,), kv_heads=1, head_dim=4), block_size=4, num_blocks=9
        ),
    ),
    block_size=4,
    enable_prefix_caching=True,
    max_model_len=16,
    num_slots=4,
)


def make_state() -> SlotState:
    state = SlotState(KV, CPU)
    for slot in range(4):
        ids = [10 * slot + i for i in range(8)]
        state.apply(alloc(slot=slot, num_prompt=8, token_ids=column(ids)))
        state.apply(AppendBlocks(slot=slot, kind=0, blocks=column([2 * slot + 1, 2 * slot + 2])))
    return state


def segment(*rows: tuple[int, int, int, int, int]) -> Segment:
    """Return a segment with rows of (slot, start, count, logits, sample)."""
    slot, start, count, logits, sample = (
        [column([row[i] for row in rows]) for i in range(5)] if rows else [column([])] * 5
    )
    return Segment(
        slot=slot,
        gen=column([1] * len(rows)),
        start=start,
        count=count,
        logits=logits,
        sample=sample,
        next_k=column([0] * len(rows)),
    )


def build(state: SlotState, prefill: Segment, decode: Segment) -> Batch:
    plan = StepPlan(step=0, prefill=prefill, decode=decode)
    return BatchBuilder(state, KV, Backends([TorchAttention()]), torch.float32).build(
        plan, StagingRing(CPU, 1).acquire()
    )


@pytest.mark.requirement("B8")
def test_one_logits_row_for_each_sampling_row() -> None:
    """Prefill rows: unfinished (no logits), finishing (last token), with prompt logprobs; and a decode
    row."""
    state = make_state()
    state.num_computed[:4] = torch.tensor([0, 2, 0, 7])
    batch = build(state, segment((0, 0, 3, 0, 0), (1, 2, 6, 1, 1), (2, 0, 4, 4, 0)), segment((3, 7, 1, 1, 1)))
    assert batch.step.logits_index.tolist() == [8, 9, 10, 11, 12, 13]
    rows = batch.sample_rows
    assert rows.slot.tolist() == rows.slot_host.tolist() == [1, 3]
    assert rows.logits_row.tolist() == [0, 5]
    assert rows.position.tolist() == [8, 8]
    assert rows.prompt_slot.tolist() == [2, 2, 2, 2]
    assert rows.prompt_logits_row.tolist() == [1, 2, 3, 4]
    assert rows.prompt_position.tolist() == [1, 2, 3, 4]


@pytest.mark.requirement("B9")
def test_a_row_that_sat_out_reads_its_true_last_token() -> None:
    """The next row reads the token that sampling wrote on the device, any number of steps later."""
    state = make_state()
    state.num_computed[:] = 8
    state.history[2, 8] = 77  # written by a step that the host has not read
    for other in range(5):
        build(state, segment((1, 0, 1 + other % 3, 0, 0)), segment())
    batch = build(state, segment(), segment((2, 8, 1, 1, 1)))
    assert batch.step.ids.tolist() == [77]
    assert batch.step.positions.tolist() == [8]


@pytest.mark.requirement("B18")
def test_offsets_are_relative_to_their_segment() -> None:
    state = make_state()
    state.num_computed[:4] = torch.tensor([0, 0, 5, 6])
    batch = build(state, segment((0, 0, 3, 1, 1), (1, 0, 2, 1, 1)), segment((2, 5, 1, 1, 1), (3, 6, 1, 1, 1)))
    prefill, decode = batch.step.segments
    assert (prefill.begin, prefill.rows, prefill.tokens) == (0, 2, 5)
    assert prefill.q_offsets.tolist() == [0, 3, 5]
    assert (decode.begin, decode.rows, decode.tokens) == (5, 2, 2)
    assert decode.q_offsets.tolist() == [0, 1, 2]
    assert decode.starts.tolist() == [5, 6]
    assert batch.step.ids.tolist() == [0, 1, 2, 10, 11, 25, 36]
    assert batch.step.positions.tolist() == [0, 1, 2, 0, 1, 5, 6]


def test_writes_follow_the_block_tables() -> None:
    state = make_state()
    state.num_computed[:4] = torch.tensor([3, 0, 0, 7])
    batch = build(state, segment((0, 3, 3, 1, 1)), segment((3, 7, 1, 1, 1)))
    assert batch.step.writes[0].tolist() == [1 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 8 * 4 + 3]
    assert batch.step.segments[0].tables[0].tolist() == [[1, 2]]


def test_the_device_decides_positions_where_the_plan_only_bounds_them() -> None:
    """A start that is an upper bound widens tables and changes nothing else."""
    state = make_state()
    state.num_computed[:] = 4
    exact = build(state, segment(), segment((1, 4, 1, 1, 1)))
    bounded = build(state, segment(), segment((1, 6, 1, 1, 1)))
    assert exact.step.positions.tolist() == bounded.step.positions.tolist() == [4]
    assert exact.step.writes[0].tolist() == bounded.step.writes[0].tolist()


def test_both_segments_may_be_empty_of_rows() -> None:
    batch = build(make_state(), segment(), segment())
    assert batch.step.ids.tolist() == []
    assert len(batch.step.logits_index) == 0
    assert len(batch.sample_rows.slot_host) == 0
