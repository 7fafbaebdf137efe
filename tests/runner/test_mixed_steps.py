"""Captured steps with prompts: the device derives the columns of a step and the tiles of its attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runner.test_batch import CPU, KV, make_state, segment
from weft.attention.base import Backends, SegmentInput
from weft.attention.gqa.triton_backend import TritonAttention, make_cut, most_tiles
from weft.config.spec import CacheSpec
from weft.ops.triton import forms
from weft.runner.batch.batch import BatchBuilder
from weft.runner.batch.staging import StagingRing
from weft.runner.graphs.graphs import bound
from weft.runner.graphs.mixed import MixedKey, columns_of
from weft.types.plan import Segment, StepPlan, column

PROMPTS, TOKENS, DECODES = 4, 12, 3


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (segment((2, 0, 5, 0, 0), (0, 2, 3, 1, 1)), segment((3, 7, 1, 1, 1), (1, 6, 1, 1, 1))),
        (segment((1, 0, 12, 1, 1)), segment()),  # no padding, no decode row
        (segment((0, 0, 1, 1, 1), (1, 3, 1, 1, 1), (2, 0, 1, 0, 0)), segment((3, 7, 1, 1, 1))),
    ],
)
def test_a_step_has_the_columns_of_a_built_batch(prefill: Segment, decode: Segment) -> None:
    """Padding comes behind the prompts and behind the decode rows, and writes to the null block."""
    state = make_state()
    for rows in (prefill, decode):
        state.num_computed[torch.from_numpy(rows.slot.astype(np.int64))] = torch.from_numpy(
            rows.start.astype(np.int64)
        )
    builder = BatchBuilder(state, KV, Backends([TritonAttention()]), torch.float32)
    plan = StepPlan(step=0, prefill=prefill, decode=decode)
    step = builder.build(plan, StagingRing(CPU, 1).acquire()).step
    key = MixedKey(TOKENS, DECODES if decode.rows else 0, 16)
    slots, offsets, moved, drawn, _ = columns_of(key, prefill, decode, PROMPTS, state.spare)
    made = builder.mixed(
        torch.from_numpy(slots),
        torch.from_numpy(offsets),
        bound(PROMPTS, TOKENS, 16),
        bound(key.decodes, 1, 16),
    )
    real = [*range(prefill.tokens), *range(TOKENS, TOKENS + decode.rows)]
    assert made.ids[real].tolist() == step.ids.tolist()
    assert made.positions[real].tolist() == step.positions.tolist()
    assert made.writes[0][real].tolist() == step.writes[0].tolist()
    rest = [token for token in range(TOKENS + key.decodes) if token not in real]
    assert set((made.writes[0][rest] // KV.block_size).tolist()) <= {0}
    first, behind = made.segments
    rows = prefill.rows
    assert first.ragged
    assert (first.tokens, behind.begin, behind.tokens) == (TOKENS, TOKENS, key.decodes)
    assert first.q_offsets[: rows + 1].tolist() == step.segments[0].q_offsets.tolist()
    assert int(first.q_offsets[-1]) == TOKENS
    for own, other in zip(made.segments, step.segments, strict=True):
        count = other.rows
        assert own.starts[:count].tolist() == other.starts.tolist()
        assert own.tables[0][:count, : other.tables[0].shape[1]].tolist() == other.tables[0].tolist()
    # The last token of every row has logits. Rows that do not sample draw for the spare slot.
    ends = np.cumsum(prefill.count) - 1
    assert made.logits_index[:rows].tolist() == ends.tolist()
    assert made.logits_index[PROMPTS : PROMPTS + decode.rows].tolist() == real[prefill.tokens :]
    assert drawn[:rows].tolist() == np.where(prefill.sample, prefill.slot, state.spare).tolist()
    assert moved[:rows].tolist() == (prefill.count - prefill.sample).tolist()
    assert not moved[rows:].any()


def ragged(counts: np.ndarray) -> SegmentInput:
    """Return a segment for which only the device has the tokens of each row."""
    rows, tokens = len(counts), int(counts.sum())
    zero = torch.zeros(rows, dtype=torch.int64)
    return SegmentInput(
        begin=0,
        rows=rows,
        tokens=tokens,
        host_counts=column([tokens] * rows),
        host_starts=column([0] * rows),
        q_offsets=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        starts=zero,
        slots=zero,
        live=zero,
        tables=(),
        ragged=True,
    )


@pytest.mark.parametrize("seed", range(6))
def test_tiles_made_on_the_device_cover_every_query_once(seed: int) -> None:
    """Rows may be empty, and tiles behind the last one have no query."""
    rng = np.random.default_rng(seed)
    tokens = 300 if seed else 0
    counts = np.diff([0, *np.sort(rng.integers(0, tokens + 1, 4)), tokens])
    spec = CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=64)
    form = forms.wide(2, 64, torch.bfloat16)
    (part,) = make_cut(ragged(counts), 4, spec, form, 0).parts
    queries = form.tile_m // 2
    covered = [
        (tile >> 32, query)
        for tile in part.tiles.tolist()
        for query in range(tile & 0xFFFFFFFF, min((tile & 0xFFFFFFFF) + queries, counts[tile >> 32]))
    ]
    assert sorted(covered) == [(row, query) for row, count in enumerate(counts) for query in range(count)]
    assert len(part.tiles) == most_tiles(ragged(counts), queries)
