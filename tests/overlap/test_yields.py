"""The number and order of yields depend on configuration and kind of plan alone (ARCHITECTURE, C4)."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.e0.rig import make_engine
from tests.e0.test_speculation import Reference
from tests.overlap.rig import rank_model
from tests.overlap.test_split import decode, prompt, segment
from tests.support.ranks import on_ranks
from weft.parallel.comm import Pending
from weft.parallel.mesh import Mesh
from weft.runner.batch.staging import StagingRing
from weft.types.exchange import UNAGREED
from weft.types.layout import Layout
from weft.types.plan import AllocSlot, AppendBlocks, StepPlan, column
from weft.types.sampling import TokenParams

MODELS = ["llama", "qwen3_moe", "qwen3_next", "deepseek_v3", "deepseek_v4"]
LENGTH = 40
PLANS = {
    "a prompt": StepPlan(step=0, prefill=segment([prompt(0, 32)])),
    "prompts without logits": StepPlan(
        step=0, prefill=segment([prompt(0, 7, logits=0), prompt(1, 9, logits=0)])
    ),
    "one decode": StepPlan(step=0, decode=segment([decode(0)])),
    "decodes": StepPlan(step=0, decode=segment([decode(i) for i in range(3)])),
    "both": StepPlan(step=0, prefill=segment([prompt(0, 20)]), decode=segment([decode(1)])),
    "nothing": StepPlan(step=0),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("models"))


def count(steps: Generator[Pending, None, torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Return (number of yields, return value)."""
    number = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return number, end.value
        number += 1


@pytest.mark.requirement("C4")
@pytest.mark.parametrize("model", MODELS)
def test_every_plan_yields_equally_often(reference: Reference, model: str) -> None:
    folder: Path = reference.folder(model)

    @torch.inference_mode()
    def work(mesh: Mesh) -> dict[str, int]:
        made = rank_model(folder, mesh)
        engine, runner = make_engine(folder, model=made, launcher=mesh.launcher)
        for slot in range(3):
            ids = column([(7 * slot + i) % 60 for i in range(LENGTH)])
            runner._state.apply(
                AllocSlot(
                    slot=slot, gen=0, choice=0, seed=0, params=TokenParams(), num_prompt=LENGTH,
                    num_cached=0, token_ids=ids,
                )
            )  # fmt: skip
            for kind, pool in enumerate(runner.kv.pools):
                if pool.cache.kind != "state":
                    blocks = -(-LENGTH // pool.block_size)
                    runner._state.apply(
                        AppendBlocks(
                            slot=slot, kind=kind, blocks=column(range(1 + 8 * slot, 1 + 8 * slot + blocks))
                        )
                    )
        for layer in runner.cache:
            for tensors in layer.values():
                for tensor in tensors:
                    tensor.zero_()
        ring, found = StagingRing(torch.device("cpu"), 1), {}
        for name, plan in PLANS.items():
            buffer = ring.acquire()
            step = runner._builder.micro_batch(plan, 0, UNAGREED, buffer)
            number, hidden = count(made.hidden(step, runner.cache, runner._backends, step.logits_index))
            assert len(hidden) == int(plan.prefill.logits.sum() + plan.decode.logits.sum())
            found[name] = number
            ring.release(buffer)
        engine.close()
        return found

    for found in on_ranks(Layout(tensor=2), work):
        layers = {"qwen3_next": 4, "deepseek_v4": 3}.get(model, 2)
        assert set(found.values()) == {1 + 2 * layers}, found


def test_alone_a_rank_never_yields(reference: Reference) -> None:
    _, runner = make_engine(reference.folder("llama"))
    buffer = StagingRing(torch.device("cpu"), 1).acquire()
    step = runner._builder.micro_batch(PLANS["nothing"], 0, UNAGREED, buffer)
    assert count(runner._model.hidden(step, runner.cache, runner._backends))[0] == 0
