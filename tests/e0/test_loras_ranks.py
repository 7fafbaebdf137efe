"""Exact tokens under LoRA adapters on several ranks, and over a prefill and a decode engine."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import Answer, make_engine, run, spec_of
from tests.e0.test_loras import GREEDY, PROMPTS, TARGETS, World, load
from tests.engine.pair_rig import pair_of, submit
from tests.support.expert_groups import Leading, Replica, run_layout
from tests.support.loras import EXPERTS
from tests.support.ranks import on_ranks
from tests.support.slowness import deadline
from weft.config.sections.lora_section import LoraSection
from weft.engine.core import Balance
from weft.layers.build import AdapterOptions, ExpertOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.parallel.mesh import Mesh
from weft.runner.runner import Runner
from weft.types.layout import Layout
from weft.types.plan import PlaceAdapter, ReplicaUpdate, StepPlan, StepResult

WAIT = deadline(60.0)


def follow(runner: Runner, plans: queue.Queue[StepPlan | None], results: queue.Queue[StepResult]) -> None:
    while (plan := plans.get(timeout=WAIT)) is not None:
        handle = runner.forward(plan)
        runner.sample(handle)
        results.put(runner.read(handle))
    runner.close()


def on_two_ranks(
    world: World, depth: int, expert: bool = False, interval: int = 0, **more: Any
) -> dict[int, Answer]:
    """Return the answers of two tensor parallel ranks. ``expert``: with whole experts, which move every
    ``interval`` steps."""
    plans: queue.Queue[StepPlan | None] = queue.Queue()
    results: queue.Queue[StepResult] = queue.Queue()
    folder = str(world.base)

    def work(mesh: Mesh) -> Any:
        places = AdapterOptions(places=1, rank=4, experts=True, saved=True)
        made = {"adapters": places, "mesh": mesh, "progress": False, **more}
        model = load_model(folder, spec_of(world.base), torch.float64, torch.device("cpu"), **made)
        assert isinstance(model, Decoder)
        options = {"chunk": 7, "depth": depth, "lora": LoraSection(max_loras=1)}
        engine, runner = make_engine(world.base, model=model, **options)
        engine.balance = Balance(interval)
        if mesh.rank:
            return follow(runner, plans, results)
        runner.__class__ = Leading
        assert isinstance(runner, Leading)
        runner.plans_of, runner.results = [plans], results
        for number, adapter in enumerate(world.adapters):
            load(engine, adapter, world.digests[number + 1])
        try:
            answers = run(engine, [world.submits()])
            if interval:
                assert model.experts is not None
                assert model.experts.moved
            return answers
        finally:
            plans.put(None)
            engine.close()

    return on_ranks(Layout(tensor=2, expert=expert), work)[0]


@pytest.mark.parametrize(
    "shape", ["llama", *(pytest.param(s, marks=pytest.mark.slow) for s in list(TARGETS)[1:])]
)
def test_two_ranks_and_one_place(shape: str, tmp_path: Path) -> None:
    world = World(tmp_path, shape)
    world.check(on_two_ranks(world, depth=2 if shape == "llama" else 1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen3_moe", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_parts_of_experts_on_two_ranks(shape: str, use_dora: bool, tmp_path: Path) -> None:
    world = World(tmp_path, shape, EXPERTS, use_dora=use_dora)
    world.check(on_two_ranks(world, depth=2))


DIVIDED = {
    "reduce": ("qwen3_moe", 0, ExpertOptions(dispatch="reduce")),
    "gather": ("qwen3_next", 0, ExpertOptions(dispatch="gather")),
    "low-latency": ("qwen3_moe", 0, ExpertOptions(dispatch="low-latency")),
    "throughput": ("deepseek_v3", 0, ExpertOptions(dispatch="throughput")),
    "moving": ("deepseek_v3", 5, ExpertOptions(redundant=2, counts=True)),
}


@pytest.mark.parametrize(
    "name", ["reduce", *(pytest.param(s, marks=pytest.mark.slow) for s in [*DIVIDED][1:])]
)
def test_whole_experts_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Rows bring the adapter to the rank of the expert, and adapters move with the expert."""
    shape, interval, options = DIVIDED[name]
    world = World(tmp_path, shape, EXPERTS, use_dora=name == "moving")
    world.check(on_two_ranks(world, depth=2, expert=True, interval=interval, experts=options))


REPLICAS = {
    "gather": ("qwen3_moe", Layout(data=2, expert=True), 0, ExpertOptions(dispatch="gather")),
    "low-latency": ("qwen3_next", Layout(data=2, expert=True), 0, ExpertOptions(dispatch="low-latency")),
    "throughput": ("deepseek_v3", Layout(data=2, expert=True), 0, ExpertOptions(dispatch="throughput")),
    "four-ranks": ("deepseek_v3", Layout(data=2, tensor=2, expert=True), 0, ExpertOptions()),
    "moving": ("deepseek_v3", Layout(data=2, expert=True), 5, ExpertOptions(redundant=2, counts=True)),
    "overlap": ("qwen3_moe", Layout(data=2, expert=True), 0, ExpertOptions()),
}


def on_replicas(
    world: World, layout: Layout, interval: int, experts: ExpertOptions, overlap: str, depth: int = 2
) -> list[Replica]:
    """Return the results of replicas that share experts, with one place each. The first replica serves
    every prompt under the first adapter, the second under the second adapter and without one."""
    places = AdapterOptions(places=1, rank=4, experts=True, saved=True)

    def make(mesh: Mesh) -> tuple[Any, Any]:
        made = {"adapters": places, "mesh": mesh, "progress": False, "experts": experts}
        model = load_model(str(world.base), spec_of(world.base), torch.float64, torch.device("cpu"), **made)
        assert isinstance(model, Decoder)
        lora = LoraSection(max_loras=1, lora_experts=True)
        options = {"launcher": mesh.launcher, "chunk": 7, "depth": depth, "lora": lora}
        engine, runner = make_engine(world.base, model=model, **options)
        engine.balance = Balance(interval)
        # Each replica knows one adapter: the ranks of the other replica get the adapter from here.
        number = mesh.layout.replica(mesh.rank)
        if not mesh.layout.place(mesh.rank):
            load(engine, world.adapters[number], world.digests[number + 1])
        return engine, runner

    submits = world.submits()
    parts = [
        [one for one in submits if one.sequence % 10 == 1],
        [one for one in submits if one.sequence % 10 != 1],
    ]
    arrivals = [[part[:1], [], part[1:]] for part in parts]
    return run_layout(layout, make, Leading, arrivals, overlap=overlap)


@pytest.mark.parametrize(
    "name", ["gather", *(pytest.param(s, marks=pytest.mark.slow) for s in [*REPLICAS][1:])]
)
def test_replicas_that_share_experts(name: str, tmp_path: Path) -> None:
    """Equal places of two replicas have different adapters, and each rank answers for both."""
    shape, layout, interval, options = REPLICAS[name]
    world = World(tmp_path, shape, EXPERTS, use_dora=name in ("moving", "four-ranks"))
    made = on_replicas(world, layout, interval, options, "all" if name == "overlap" else "off")
    world.check({number: answer for replica in made for number, answer in replica.answers.items()})
    for replica in made:
        updates = [op for plan in replica.plans for op in plan.ops if isinstance(op, ReplicaUpdate)]
        assert any(isinstance(op.update, PlaceAdapter) for op in updates)
    agreed = [plan.agreed for plan in made[0].plans if plan.agreed is not None]
    assert any(one.adapted for one in agreed)
    if name == "overlap":
        assert any(one.adapted and one.overlap for one in agreed)
    if interval:
        assert any(one.rebalance for one in agreed)


@pytest.mark.parametrize(
    ("places", "shape"),
    [
        (1, "llama"),
        (2, "llama"),
        *(pytest.param(1, s, marks=pytest.mark.slow) for s in ("qwen3_moe", "deepseek_v3")),
    ],
)
def test_prefill_and_decode_on_two_engines(places: int, shape: str, tmp_path: Path) -> None:
    world = World(tmp_path / "world", shape, EXPERTS if shape == "qwen3_moe" else "")
    modules = [f"{folder.name}={folder}" for folder in world.adapters]
    pair = pair_of(
        tmp_path,
        shape,
        model=str(world.base),
        load_format="auto",
        max_loras=places,
        max_lora_rank=4,
        lora_experts=True,
        lora_modules=modules,
        max_model_len=96,
    )
    try:
        for number, prompt in enumerate(PROMPTS):
            for adapter, digest in enumerate(world.digests):
                pair.submit(submit(10 * number + adapter, prompt, GREEDY, adapter=digest))
        pair.run()
        for number in range(len(PROMPTS)):
            for adapter in range(len(world.digests)):
                answer = pair.answers[10 * number + adapter]
                assert [answer.tokens[at] for at in sorted(answer.tokens)] == world.due[adapter][number]
                assert answer.finish == ["moved", "length"]
        pair.check_given_back()
    finally:
        pair.close()
