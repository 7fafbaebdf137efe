"""Exact tokens: in float64, tokens equal those of one rank for any number of ranks.

Every rank has a runner over its shard of the model. The scheduler of rank 0 plans, and every rank executes
the plans: with chunks, preemption, prefix hits, two steps in flight, sampling and drafts.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.e0.rig import Answer, Recorder, make_engine, run, spec_of, submit
from tests.e0.test_grid import PROMPTS, SAMPLING
from tests.support.checkpoints import make_checkpoint
from tests.support.expert_groups import Leading
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.config.sections.all import SpeculationSection
from weft.engine.core import Balance, EngineCore
from weft.layers.build import ExpertOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.moe.placement import in_order
from weft.parallel.mesh import Mesh
from weft.runner.runner import Runner
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.plan import StepPlan, StepResult
from weft.types.sampling import TokenParams

WAIT = deadline(60.0)
"""Seconds for a plan or a result of another rank."""
CASES: dict[str, dict[str, Any]] = {
    "chunks, deep": {"shape": "qwen2_windowed", "chunk": 7, "depth": 2},
    "experts, preemption": {"shape": "qwen3_moe", "blocks": 24, "sampling": "seeded"},
    "states, prefix hits, deep": {"shape": "qwen3_next_wide", "chunk": 16, "depth": 2, "hits": True},
    "latents, seeded": {"shape": "deepseek_v3", "chunk": 16, "sampling": "seeded"},
    "states and latents": {"shape": "kimi_linear", "chunk": 16, "depth": 2, "hits": True},
    "sparse, hashed experts": {"shape": "deepseek_v4", "chunk": 7},
    "module's drafts, deep": {"shape": "mtp", "depth": 2, "speculation": "mtp"},
    "lines in 8 bits": {"shape": "qwen3_moe", "chunk": 16, "cache": "fp8"},
    "sparse latents in 8 bits": {"shape": "deepseek_v32", "chunk": 7, "cache": "fp8"},
    "sparse latents in 8 bits, shared choices": {"shape": "glm_dsa", "chunk": 7, "cache": "fp8"},
    "compressed entries in 8 bits": {"shape": "deepseek_v4", "chunk": 7, "cache": "fp8"},
    "n-grams": {"shape": "llama", "chunk": 16, "speculation": "ngram"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(shape: str) -> Path:
        if shape not in made:
            root = tmp_path_factory.mktemp(shape)
            mtp = shape == "mtp"
            made[shape] = make_mtp_checkpoint(root, skilled=True) if mtp else make_checkpoint(root, shape)
        return made[shape]

    return get


def _submits(case: dict[str, Any]) -> list[list[Submit]]:
    params = replace(SAMPLING[case.get("sampling", "greedy")], max_tokens=20)
    arrivals = [[submit(i + 1, PROMPTS[i], params, request=i)] for i in range(5)]
    if "blocks" in case:
        filler = TokenParams(temperature=0.0, max_tokens=60)
        arrivals[0].append(submit(99, PROMPTS[15][:30], filler, request=99, priority=-1))
    if case.get("hits"):
        arrivals += [[]] * 60 + [[submit(50, PROMPTS[0], params, request=0)]]
    return arrivals


def _follow(runner: Runner, plans: queue.Queue[StepPlan | None], results: queue.Queue[StepResult]) -> None:
    while (plan := plans.get(timeout=WAIT)) is not None:
        handle = runner.forward(plan)
        runner.sample(handle)
        results.put(runner.read(handle))
    runner.close()


def _engine(folder: Path, case: dict[str, Any], model: Decoder) -> tuple[EngineCore, Recorder]:
    method = case.get("speculation", "none")
    return make_engine(
        folder,
        blocks=case.get("blocks", 256),
        chunk=case.get("chunk", 0),
        depth=case.get("depth", 1),
        model=model,
        speculation=SpeculationSection(speculative_method=method, speculative_adaptive=False),
    )


def _load(folder: Path, case: dict[str, Any], mesh: Mesh | None = None) -> Decoder:
    spec = spec_of(folder, int(case.get("speculation") == "mtp"), case.get("cache", "auto"))
    cpu, experts = torch.device("cpu"), case.get("experts")
    model = load_model(str(folder), spec, torch.float64, cpu, progress=False, mesh=mesh, experts=experts)
    assert isinstance(model, Decoder)
    return model


def _on_ranks(folder: Path, case: dict[str, Any], layout: Layout) -> tuple[dict[int, Answer], EngineCore]:
    plans_of: list[queue.Queue[StepPlan | None]] = [queue.Queue() for _ in range(layout.ranks - 1)]
    results: queue.Queue[StepResult] = queue.Queue()

    def work(mesh: Mesh) -> Any:
        engine, runner = _engine(folder, case, _load(folder, case, mesh))
        if mesh.rank:
            return _follow(runner, plans_of[mesh.rank - 1], results)
        runner.__class__ = Leading
        assert isinstance(runner, Leading)
        runner.plans_of, runner.results = plans_of, results
        engine.balance = Balance(case.get("interval", 0))
        try:
            return run(engine, _submits(case)), engine
        finally:
            for one in plans_of:
                one.put(None)
            engine.close()

    return on_ranks(layout, work)[0]


def _check(case: dict[str, Any], folder: Path, layout: Layout) -> EngineCore:
    engine, _ = _engine(folder, {**case, "depth": 1, "chunk": 0, "blocks": 256}, _load(folder, case))
    expected = run(engine, _submits(case))
    engine.close()
    found, engine = _on_ranks(folder, case, layout)
    assert {n: a.tokens for n, a in found.items()} == {n: a.tokens for n, a in expected.items()}
    # The features were active.
    stats = engine.stats()
    assert isinstance(engine.runner.runner, Leading)
    assert engine.runner.runner.deepest == case.get("depth", 1)
    assert (stats.preemptions > 0) == ("blocks" in case)
    assert stats.prefix_hits > 0 or not case.get("hits")
    assert (sum(stats.drafts_accepted) > 0) == ("speculation" in case)
    return engine


@pytest.mark.requirement("A9", "A11")
@mostly_slow("name", CASES, [*CASES][:3])
def test_tokens_on_two_ranks(name: str, folder: Any) -> None:
    _check(CASES[name], folder(CASES[name]["shape"]), Layout(tensor=2))


@pytest.mark.grid
@pytest.mark.parametrize("name", CASES)
def test_tokens_on_four_ranks(name: str, folder: Any) -> None:
    _check(CASES[name], folder(CASES[name]["shape"]), Layout(tensor=4))


#: Experts divided over the ranks of one replica: every form of dispatch, and experts that move.
EXPERT_CASES: dict[str, dict[str, Any]] = {
    "reduce, preemption": {
        "shape": "qwen3_moe",
        "blocks": 24,
        "sampling": "seeded",
        "experts": ExpertOptions(dispatch="reduce"),
    },
    "throughput, hashed, chunks": {
        "shape": "deepseek_v4",
        "chunk": 7,
        "experts": ExpertOptions(dispatch="throughput"),
    },
    "low-latency, module's drafts, deep": {
        "shape": "mtp",
        "depth": 2,
        "speculation": "mtp",
        "experts": ExpertOptions(dispatch="low-latency"),
    },
    "gather, states, prefix hits": {
        "shape": "qwen3_next_wide",
        "chunk": 16,
        "hits": True,
        "experts": ExpertOptions(dispatch="gather"),
    },
    "reduce, states and latents, prefix hits": {
        "shape": "kimi_linear",
        "chunk": 7,
        "hits": True,
        "experts": ExpertOptions(dispatch="reduce"),
    },
    "moving, redundant, deep": {
        "shape": "deepseek_v3",
        "depth": 2,
        "chunk": 16,
        "interval": 5,
        "experts": ExpertOptions(redundant=2, counts=True),
    },
}


@pytest.mark.requirement("A10")
@mostly_slow("name", EXPERT_CASES, [*EXPERT_CASES][:1])
def test_tokens_with_divided_experts(name: str, folder: Any) -> None:
    case = EXPERT_CASES[name]
    engine = _check(case, folder(case["shape"]), Layout(tensor=2, expert=True))
    _engaged(engine, case)


@pytest.mark.grid
@pytest.mark.parametrize("name", EXPERT_CASES)
def test_tokens_with_experts_on_four_ranks(name: str, folder: Any) -> None:
    case = EXPERT_CASES[name]
    engine = _check(case, folder(case["shape"]), Layout(tensor=4, expert=True))
    _engaged(engine, case)


def _engaged(engine: EngineCore, case: dict[str, Any]) -> None:
    assert isinstance(engine.runner.runner, Leading)
    experts = engine.runner.runner._model.experts
    assert experts is not None
    assert experts.rebalanced == engine.balance.asked
    assert (experts.rebalanced > 1) == ("interval" in case)
    if "interval" in case:
        assert experts.placements[0] != in_order(8, len(experts.placements[0]), 2)
