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
from tests.support.expert_groups import Leading
from tests.support.ranks import on_ranks
from tests.support.slowness import deadline
from weft.config.sections.lora_section import LoraSection
from weft.layers.build import AdapterOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.parallel.mesh import Mesh
from weft.runner.runner import Runner
from weft.types.layout import Layout
from weft.types.plan import StepPlan, StepResult

WAIT = deadline(60.0)


def follow(runner: Runner, plans: queue.Queue[StepPlan | None], results: queue.Queue[StepResult]) -> None:
    while (plan := plans.get(timeout=WAIT)) is not None:
        handle = runner.forward(plan)
        runner.sample(handle)
        results.put(runner.read(handle))
    runner.close()


def on_two_ranks(world: World, depth: int) -> dict[int, Answer]:
    plans: queue.Queue[StepPlan | None] = queue.Queue()
    results: queue.Queue[StepResult] = queue.Queue()
    folder = str(world.base)

    def work(mesh: Mesh) -> Any:
        made = {"adapters": AdapterOptions(places=1, rank=4), "mesh": mesh, "progress": False}
        model = load_model(folder, spec_of(world.base), torch.float64, torch.device("cpu"), **made)
        assert isinstance(model, Decoder)
        options = {"chunk": 7, "depth": depth, "lora": LoraSection(max_loras=1)}
        engine, runner = make_engine(world.base, model=model, **options)
        if mesh.rank:
            return follow(runner, plans, results)
        runner.__class__ = Leading
        assert isinstance(runner, Leading)
        runner.plans_of, runner.results = [plans], results
        for number, adapter in enumerate(world.adapters):
            load(engine, adapter, world.digests[number + 1])
        try:
            return run(engine, [world.submits()])
        finally:
            plans.put(None)
            engine.close()

    return on_ranks(Layout(tensor=2), work)[0]


@pytest.mark.parametrize(
    "shape", ["llama", *(pytest.param(s, marks=pytest.mark.slow) for s in list(TARGETS)[1:])]
)
def test_two_ranks_and_one_place(shape: str, tmp_path: Path) -> None:
    world = World(tmp_path, shape)
    world.check(on_two_ranks(world, depth=2 if shape == "llama" else 1))


@pytest.mark.parametrize("places", [1, 2])
def test_prefill_and_decode_on_two_engines(places: int, tmp_path: Path) -> None:
    world = World(tmp_path / "world", "llama")
    modules = [f"{folder.name}={folder}" for folder in world.adapters]
    pair = pair_of(
        tmp_path,
        "llama",
        model=str(world.base),
        load_format="auto",
        max_loras=places,
        max_lora_rank=4,
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
