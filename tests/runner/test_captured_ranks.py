"""Steps of several ranks with collectives in shared memory, captured and replayed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.e0.rig import run, submit
from tests.e1.rig import VOCAB, make_checkpoint, make_engine, requests_of_lengths
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.ranks import on_ranks
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.config.sections.all import SpeculationSection
from weft.engine.core import EngineCore
from weft.engine.start import alone
from weft.layers.build import ExpertOptions
from weft.ops import cpu
from weft.parallel.group_comm import CommLost
from weft.parallel.mesh import Mesh
from weft.runner import drafting
from weft.runner.graphs import graphs
from weft.runner.graphs.programs import CannotCapture
from weft.types.layout import Layout
from weft.types.plan import StepPlan
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")

TWO = Layout(tensor=2)
LONG = deadline(30.0)
"""Seconds. A wait that ends earlier was aborted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in made:
            root = tmp_path_factory.mktemp(model)
            if model == "mtp":
                heads = {"kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
                sizes = {**heads, "vocab_size": VOCAB, "max_position_embeddings": 384, "hidden_size": 64}
                made[model] = make_mtp_checkpoint(root, skilled=True, **sizes)
            else:
                made[model] = make_checkpoint(root, model)
        return made[model]

    return get


class Answers:
    """The results of one rank: tokens, logits by seed and position, replayed steps, collectives of each
    step."""

    def __init__(self, engine: Any, runner: Any) -> None:
        self.flights: list[int] = []
        self.uneven = 0
        observe = engine.overlap.observe

        def observed(plan: StepPlan, times: Any) -> None:
            self.flights.append(len(times.flights))
            self.uneven += len(set(plan.decode.count.tolist())) > 1 and not plan.prefill.rows
            assert all(flight.began <= flight.ended <= time.monotonic() for flight in times.flights)
            observe(plan, times)

        engine.overlap.observe = observed
        asked = requests_of_lengths(4)
        self.tokens = {number: answer.tokens for number, answer in run(engine, [asked]).items()}
        self.bits = runner.bits
        self.replayed = 0 if runner.graphs is None else runner.graphs.replayed


def answers(folder: Path, layout: Layout = TWO, change: Any = None, **options: Any) -> list[Answers]:
    """Return the results of every rank. Each rank has a scheduler; all schedulers make the same plans."""

    def work(mesh: Mesh) -> Answers:
        torch.set_num_threads(1)
        engine, runner = make_engine(folder, mesh=mesh, max_num_seqs=4, **options)
        if change is not None:
            change(mesh, runner)
        made = Answers(engine, runner)
        engine.close()
        return made

    return on_ranks(layout, work, LONG)


def assert_same(made: list[Answers], expected: list[Answers]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.bits.keys() == other.bits.keys()
        assert all(torch.equal(one.bits[key][0], rows[0]) for key, rows in other.bits.items())


@pytest.mark.parametrize(
    ("model", "dtype", "expert", "dispatch"),
    [
        ("qwen3_moe", "bfloat16", False, "auto"),
        ("deepseek_v3", "float32", True, "reduce"),
        pytest.param("deepseek_v3", "bfloat16", False, "auto", marks=pytest.mark.grid),
        pytest.param("qwen2_mixed", "bfloat16", False, "auto", marks=pytest.mark.grid),
        pytest.param("gpt_oss", "float32", True, "reduce", marks=pytest.mark.grid),
        pytest.param("qwen3_moe", "bfloat16", True, "gather", marks=pytest.mark.grid),
        pytest.param("qwen3_moe", "float32", True, "low-latency", marks=pytest.mark.grid),
    ],
)
def test_replayed_steps_of_two_ranks_give_the_same_bits(
    model: str, dtype: str, expert: bool, dispatch: str, folder: Any
) -> None:
    layout = Layout(tensor=2, expert=expert)
    options: dict[str, Any] = {"dtype": dtype, "form": "cpp", "experts": ExpertOptions(dispatch=dispatch)}
    made = answers(folder(model), layout, replay=True, **options)
    expected = answers(folder(model), layout, **options)
    assert_same(made, expected)
    assert all(one.replayed > 10 for one in made)
    assert not any(one.replayed for one in expected)
    # Collectives are counted in replayed steps as well.
    assert made[0].flights == made[1].flights == expected[0].flights


def test_steps_whose_rows_are_counted_are_not_replayed(folder: Any) -> None:
    """The host reads the number of rows to send, which cannot be captured."""
    layout, counted = Layout(tensor=2, expert=True), ExpertOptions(dispatch="throughput")
    options: dict[str, Any] = {"dtype": "bfloat16", "form": "cpp", "replay": True}
    made = answers(folder("qwen3_moe"), layout, experts=counted, **options)
    assert_same(made, answers(folder("qwen3_moe"), layout, **options))
    assert not any(one.replayed for one in made)


@pytest.mark.requirement("A10")
@pytest.mark.parametrize("drafter", ["ngram", pytest.param("mtp", marks=pytest.mark.grid)])
def test_uneven_drafts_where_a_rank_cannot_record(
    drafter: str, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with fewer drafts are padded in every rank, so that collectives have one size.

    One rank records steps, the other cannot. One rank has been there for long, the other is new in the epoch.
    """
    monkeypatch.setattr(graphs, "WORTH_CAPTURING", 2)
    monkeypatch.setattr(drafting, "WORTH_CAPTURING", 2)
    speculation = SpeculationSection(
        speculative_method=drafter,  # type: ignore[arg-type]
        num_speculative_tokens=3,
        speculative_adaptive=False,
    )
    where = folder("mtp" if drafter == "mtp" else "qwen3_moe")
    options = {"dtype": "float32", "form": "cpp", "speculation": speculation}

    def refuse(made: Any) -> Any:
        made()
        raise CannotCapture("it must not be")

    def change(mesh: Mesh, runner: Any) -> None:
        if mesh.rank:
            runner.graphs._options = replace(runner.graphs._options, capture=refuse)
            if drafter == "mtp":
                runner.drafter.captured._capturing = replace(
                    runner.drafter.captured._capturing, capture=refuse
                )

    made = answers(where, change=change, replay=True, **options)
    assert_same(made, answers(where, **options))
    assert made[0].replayed > 1
    assert made[1].replayed == 0
    assert made[0].uneven


def steps(engine: EngineCore) -> None:
    while True:
        engine.step()


def test_an_abort_in_the_middle_of_a_replayed_step(folder: Any) -> None:
    """An abort frees a rank that waits in a replayed step for a missing peer.

    The error equals the error of an eager step. Nothing runs until the reset. The next epoch captures steps
    again; an epoch over gloo launches eager steps.
    """
    where, store = folder("qwen3_moe"), dist.HashStore()
    waiting, formed = threading.Event(), threading.Barrier(2)

    def work(mesh: Mesh) -> tuple[Answers, float, str]:
        torch.set_num_threads(1)
        engine, runner = make_engine(where, "float32", "cpp", mesh=mesh, max_num_seqs=4, replay=True)
        engine.submit(submit(9, [1, 2, 3], TokenParams(temperature=0.0, max_tokens=50), request=9))
        while runner.graphs.replayed < 3:
            engine.step()
        if mesh.rank:
            assert waiting.wait(LONG)
            time.sleep(0.2)
            mesh.abort()
        waiting.set()
        began = time.monotonic()
        with pytest.raises(CommLost) as lost:
            steps(engine)
        took = time.monotonic() - began
        handle = runner.forward(StepPlan(step=runner._next_step))
        runner.sample(handle)
        with pytest.raises(EngineDead, match="an earlier step failed"):
            runner.read(handle)
        mesh.abort()
        formed.wait(LONG)
        before = runner.graphs.replayed
        runner.reset()
        mesh.connect(store, 1, LONG)
        runner.bits = {}
        after = Answers(EngineCore(engine.config, runner=alone(runner.kv, lambda kv: runner)), runner)
        assert after.replayed > before + 10
        mesh.abort()
        formed.wait(LONG)
        runner.reset()
        mesh.tp._share = False  # type: ignore[attr-defined]
        mesh.connect(store, 2, LONG)
        runner.bits = {}
        sockets = Answers(EngineCore(engine.config, runner=alone(runner.kv, lambda kv: runner)), runner)
        assert_same([sockets], [after])
        assert sockets.replayed == after.replayed
        runner.close()
        return after, took, lost.value.message

    expected = answers(where, dtype="float32", form="cpp")
    ran = on_ranks(TWO, work, LONG)
    assert_same([after for after, _, _ in ran], expected)
    assert all(took < LONG / 2 for _, took, _ in ran)
    assert "a replayed step failed: the group was aborted" in ran[0][2]
