"""Captured decode steps give the tokens of eager steps, and padding changes no other data.

On the CPU the "captured" function is the closure, called again for every replay. Everything except the
capture is the code that runs on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.e0.rig import MAX_LEN, Recorder, make_engine, run, submit
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.slow import mostly_slow
from weft.attention.base import Backends
from weft.attention.gqa.torch_backend import TorchAttention
from weft.attention.gqa.triton_backend import TritonAttention
from weft.engine.core import EngineCore
from weft.parallel.mesh import Mesh
from weft.runner.graphs import graphs
from weft.runner.graphs.graphs import (
    Capture,
    DecodeGraphs,
    GraphOptions,
    Key,
    context_buckets,
    obstacle,
    row_buckets,
)
from weft.types.layout import Layout
from weft.types.plan import Agreement, Segment, StepPlan, column
from weft.types.sampling import TokenParams


def same(run: Callable[[], None]) -> Callable[[], None]:
    return run


def with_graphs(
    folder: Path,
    max_rows: int,
    most_each: int = 1,
    capture: Capture = same,
    lazy: bool = False,
    **more: Any,
) -> tuple[EngineCore, Recorder]:
    engine, runner = make_engine(folder, **more)
    runner.graphs = DecodeGraphs(
        runner._model,
        runner._cache,
        runner._backends,
        runner._builder,
        runner._state,
        MAX_LEN,
        GraphOptions(max_rows=max_rows, capture=capture, most_each=most_each, lazy=lazy),
    )
    return engine, runner


@pytest.fixture(scope="module", params=["llama", "qwen2_windowed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs"), request.param)


def arrivals(count: int) -> list[list[Any]]:
    """Return requests with every kind of sampling, a few in each step, so that the number of rows varies."""
    rng = random.Random(5)
    steps: list[list[Any]] = [[] for _ in range(3 * count)]
    for i in range(count):
        params = [
            TokenParams(temperature=0.0, max_tokens=4 + 3 * (i % 9)),
            TokenParams(temperature=1.0, top_k=9, top_p=0.9, max_tokens=12),
            TokenParams(temperature=0.8, repetition_penalty=1.2, logprobs=2, max_tokens=20),
        ][i % 3]
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(2, 50))]
        steps[rng.randrange(len(steps))].append(submit(i + 1, prompt, params, request=i))
    return steps


@mostly_slow(("depth", "max_rows"), [(1, 12), (2, 12), (2, 3)], [(2, 12)])
def test_tokens_equal_those_of_steps_launched_op_by_op(
    folder: Path, depth: int, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows within and beyond the largest bucket, contexts in several buckets, and mixed steps in between."""
    monkeypatch.setattr(graphs, "FIRST_CONTEXT", 16)
    asked = arrivals(12)
    eager, _ = make_engine(folder, depth=depth, chunk=7, max_num_seqs=12)
    captured, runner = with_graphs(folder, max_rows, depth=depth, chunk=7, max_num_seqs=12)
    expected, made = run(eager, asked), run(captured, asked)
    eager.close()
    captured.close()
    assert {i: a.tokens for i, a in made.items()} == {i: a.tokens for i, a in expected.items()}
    assert runner.graphs is not None
    assert runner.graphs.replayed > 20
    # A step with a prompt is never replayed. Every pure decode step that fits is replayed.
    pure = [p for p in runner.plans if not p.prefill.rows and 0 < p.decode.rows <= max_rows]
    assert runner.graphs.replayed == len(pure) < len(runner.plans)


def test_graphs_of_ranks_are_captured_when_needed_and_dropped_with_the_epoch(folder: Path) -> None:
    """Graphs with communicators are captured per bucket of rows, in the first step that needs the bucket."""
    asked, captures = arrivals(12), 0

    def computed(run: Callable[[], None]) -> Callable[[], None]:
        nonlocal captures
        captures += 1
        run()
        return run

    eager, _ = make_engine(folder, chunk=7, max_num_seqs=12)
    captured, runner = with_graphs(folder, 12, chunk=7, max_num_seqs=12, capture=computed, lazy=True)
    assert captures == 0
    expected, made = run(eager, asked), run(captured, asked)
    eager.close()
    assert {i: a.tokens for i, a in made.items()} == {i: a.tokens for i, a in expected.items()}
    assert runner.graphs is not None
    assert 3 <= captures <= len(row_buckets(12)) < len({p.decode.rows for p in runner.plans})
    pure = [plan for plan in runner.plans if not plan.prefill.rows]
    assert runner.graphs.replayed + captures == len(pure) > 20
    before = captures
    runner.graphs.forget()
    again = run(captured, asked)
    captured.close()
    assert {i: a.tokens for i, a in again.items()} == {i: a.tokens for i, a in expected.items()}
    assert before < captures <= 2 * before


def prefilled(folder: Path, rows: int) -> tuple[EngineCore, Recorder]:
    """Return an engine whose next steps decode ``rows`` rows."""
    engine, runner = with_graphs(folder, 8, max_num_seqs=8)
    for i in range(rows):
        engine.submit(submit(i + 1, [5 + i, 9, 3 * i], TokenParams(temperature=0.0, max_tokens=9), request=i))
    while not runner.graphs.replayed:  # type: ignore[union-attr]
        engine.step()
    return engine, runner


def test_padding_touches_the_null_block_and_the_spare_slot_alone(folder: Path) -> None:
    engine, runner = prefilled(folder, 3)  # a bucket of 4
    state, cache = runner._state, runner._cache
    before = [tensors[0].clone() for layer in cache for tensors in layer.values()]
    columns = [column.clone() for column in (state.history, state.num_computed, *state.tables)]
    lengths = state.num_computed.clone()
    engine.step()
    plan = runner.plans[-1]
    assert plan.decode.rows == 3
    slots = torch.from_numpy(plan.decode.slot.astype("int64"))
    spec = runner._model.spec
    for layer, (old, caches) in enumerate(zip(before, cache, strict=True)):
        ((new,),) = caches.values()
        changed = ~((old == new) | (old.isnan() & new.isnan())).flatten(3).all(dim=3)  # [blocks, 2, kv_heads]
        table, size = state.tables[spec.cache_of(layer)], new.shape[3]
        own = {int(table[slot, int(lengths[slot]) // size]) for slot in slots}
        assert len(own) == 3
        assert set(changed.flatten(1).any(dim=1).nonzero().flatten().tolist()) <= own | {0}
        assert not new[0, :, :, 1:].isfinite().any(), "position 0 of the null block at most"
    history, computed, *tables = columns
    computed[slots] += 1
    assert torch.equal(state.num_computed, computed)
    assert all(torch.equal(a, b) for a, b in zip(state.tables, tables, strict=True))
    different = (state.history != history).nonzero()[:, 0].tolist()
    assert set(different) <= set(slots.tolist())
    assert not state.history[state.spare].any()
    assert int(state.num_computed[state.spare]) == 0
    while engine.has_work():
        engine.step()
    engine.close()


def test_the_column_that_graphs_read_never_moves(folder: Path) -> None:
    """Staging buffers may be reallocated: a replay reads its own memory."""
    engine, runner = prefilled(folder, 5)
    assert runner.graphs is not None
    address = runner.graphs._columns.data_ptr()
    while engine.has_work():
        for buffer in runner._ring._free:
            buffer._allocate(8192)
        engine.step()
    engine.close()
    assert runner.graphs._columns.data_ptr() == address
    assert not any(tensor.is_inference() for tensor in (runner.graphs._columns, runner.graphs._logits))


def plan_of(**columns: list[int]) -> StepPlan:
    rows = len(columns["slot"])
    given = {"gen": [1] * rows, "count": [1] * rows, "logits": [1] * rows, "sample": [1] * rows}
    return StepPlan(
        step=0,
        decode=Segment(**{name: column(values) for name, values in {**given, **columns}.items()}),
    )


def test_which_steps_are_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FIRST_CONTEXT", 16)
    engine, runner = with_graphs(folder, 6)
    found = runner.graphs.find  # type: ignore[union-attr]
    assert found(plan_of(slot=[0], start=[15])) == Key(1, 1, 16)
    assert found(plan_of(slot=[0, 1, 2], start=[3, 16, 4])) == Key(4, 1, 64)
    assert found(plan_of(slot=[0] * 5, start=[95] * 5)) == Key(6, 1, 96)
    assert found(plan_of(slot=[0] * 7, start=[5] * 7)) is None
    pair = {"slot": [0, 1], "count": [1, 2], "logits": [1, 2], "sample": [1, 2]}
    assert found(plan_of(**pair, start=[5, 15])) is None
    engine.close()
    engine, runner = with_graphs(folder, 6, most_each=2)
    found = runner.graphs.find  # type: ignore[union-attr]
    assert found(plan_of(slot=[0], start=[15])) == Key(1, 1, 16)
    assert found(plan_of(**pair, start=[5, 14])) == Key(2, 2, 16)
    assert found(plan_of(**pair, start=[5, 15])) == Key(2, 2, 64)
    assert (
        found(plan_of(**{**pair, "count": [1, 3], "logits": [1, 3], "sample": [1, 3]}, start=[5, 5])) is None
    )
    assert found(plan_of(slot=[0, 1], start=[5, 5], logits=[1, 0], sample=[1, 0])) is None
    assert found(plan_of(slot=[], start=[])) is None
    assert found(StepPlan(step=0, prefill=plan_of(slot=[0], start=[3]).decode)) is None
    engine.close()


def test_which_steps_of_replicas_are_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are replayed if no replica exceeds the largest pad, from the second such step on."""
    monkeypatch.setattr(graphs, "FIRST_CONTEXT", 16)
    engine, runner = with_graphs(folder, 6, most_each=2, lazy=True)
    one = plan_of(slot=[0], start=[5])
    pair = plan_of(slot=[0, 1], count=[1, 2], logits=[1, 2], sample=[1, 2], start=[5, 6])

    def found(plan: StepPlan, padded: int) -> Key | None:
        agreed = Agreement(wave=1, padded_tokens=padded)
        return runner.graphs.find(msgspec.structs.replace(plan, agreed=agreed))  # type: ignore[union-attr]

    assert found(one, 8) is None, "the first of its kind"
    assert found(one, 8) == Key(1, 1, 16, 1, 8)
    assert found(one, 16) is None, "padded to another size"
    assert [found(one, 72) for _ in range(3)] == [None] * 3, "somebody computes a prompt"
    assert [found(pair, 4) for _ in range(2)] == [None, Key(2, 2, 16, 1, 4)]
    assert [found(pair, 3) for _ in range(2)] == [None, None], (
        "filled up it has more rows than were agreed on"
    )
    idle = plan_of(slot=[], start=[])
    assert [found(idle, 4) for _ in range(2)] == [None, Key(0, 1, 16, 1, 4)]

    # One row is one micro-batch, and the other replicas exchange two: their collectives would not meet.
    runner.graphs._options = replace(runner.graphs._options, micro_batches=True)  # type: ignore[union-attr]
    halves = msgspec.structs.replace(one, micro_batches=2)
    assert [found(halves, 8) for _ in range(3)] == [None] * 3
    engine.close()


@pytest.mark.parametrize(("asking", "bucket"), [((), (4, 1, 96)), ((2,), None), ((4,), None)])
def test_trials_need_both_forms(
    asking: tuple[int, ...],
    bucket: tuple[int, int, int] | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are compared only if a whole step, of 4 rows, and micro-batches, of 2 rows, can be captured."""
    engine, runner = with_graphs(folder, 6, lazy=True)
    assert runner.graphs is not None
    plan = plan_of(slot=[0, 1, 2], start=[3, 16, 4])
    assert runner.graphs.bucket_of(plan) is None, "micro-batches are not captured"
    runner.graphs.splits = True
    monkeypatch.setattr(runner._model, "capturable", lambda *tokens: not set(tokens) & set(asking))
    assert runner.graphs.bucket_of(plan) == bucket
    engine.close()


def test_buckets() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(12) == [1, 2, 4, 8, 12]
    assert row_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert row_buckets(65536)[-1] == graphs.MOST_ROWS
    assert context_buckets(100) == [100]
    assert context_buckets(2048) == [2048]
    assert context_buckets(32768) == [2048, 8192, 32768]


def test_reasons_against_capture_are_reported(tmp_path: Path, folder: Path) -> None:
    dense = make_engine(folder)[1]._model
    assert obstacle(dense, Backends([TritonAttention()])) is None
    assert "attention backend" in str(obstacle(dense, Backends([TorchAttention()])))
    dense.mesh = Mesh(layout=Layout(tensor=2))
    assert obstacle(dense, Backends([TritonAttention()])) is None, "collectives in shared memory are captured"
    dense.device = torch.device("cuda")
    assert "not use NCCL" in str(obstacle(dense, Backends([TritonAttention()])))
    dense.mesh = Mesh(layout=Layout(tensor=2), nccl=True)
    assert obstacle(dense, Backends([TritonAttention()])) is None
    routed = make_engine(make_checkpoint(tmp_path, "qwen3_moe"))[1]._model
    assert "moe (torch)" in str(obstacle(routed, Backends([TritonAttention()])))
