"""Effects of a failing, slow or silent rank on a step in micro-batches.

The failing rank aborts its groups, as executor and worker do. Here the test aborts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import make_engine as make_e0_engine
from tests.e0.rig import run, submit
from tests.e0.test_grid import PROMPTS
from tests.overlap.rig import Decided, Decisions, on_engines, rank_model
from tests.support.checkpoints import make_checkpoint
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.models.decoder import Decoder
from weft.overlap.overlap_policy import OverlapPolicy
from weft.parallel.group_comm import CommLost
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=12)
DEADLINE = deadline(60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "llama")


def submits() -> list[list[Submit]]:
    return [[submit(1 + i, PROMPTS[i], GREEDY, request=i) for i in range(4)]]


def breaks(model: Decoder, where: str, call: int) -> Callable[[], None]:
    """Make ``model`` raise at the ``call``-th call of ``where``. Micro-batch 0 comes first."""
    found: Any = {
        "before": model.embedding,
        "between": model.blocks[1].attention,
        "in the middle of a layer": model.blocks[0].feed_forward,
        "after": model.norm,
        "in the head": model.head,
    }[where]
    name = "add" if where == "after" else "forward"
    plain, calls = getattr(found, name), [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise ValueError(f"planted {where}")
        return plain(*args)

    setattr(found, name, failing)
    return lambda: setattr(found, name, plain)


@pytest.mark.requirement("C5", "C13")
@mostly_slow(
    "where",
    ["before", "between", "in the middle of a layer", "after", "in the head"],
    ["in the middle of a layer", "in the head"],
)
@mostly_slow("call", [1, 2, 5], [2], ids=["first micro-batch", "second micro-batch", "later step"])
@mostly_slow("depth", [1, 2], [2])
def test_a_rank_that_raises_ends_the_step_everywhere(folder: Path, where: str, call: int, depth: int) -> None:
    """The failing rank raises the exception, the others raise CommLost at once, before the time-out.

    Then all ranks form again with the same weights, and the same requests give the same tokens.
    """
    if where == "in the head" and call == 2:
        call = 3  # computed once for both micro-batches
    gathered, formed = threading.Barrier(2), threading.Barrier(2)
    decisions = [Decisions(), Decisions()]

    def work(mesh: Mesh) -> tuple[Exception, float, dict[int, list[int]]]:
        torch.set_num_threads(1)
        model = rank_model(folder, mesh)
        engine, runner = make_e0_engine(folder, model=model, launcher=mesh.launcher, depth=depth)
        engine.overlap = Decided("all", mesh.rank, decisions[0])
        mend = breaks(model, where, call) if mesh.rank == 1 else lambda: None
        gathered.wait(DEADLINE)
        began = time.monotonic()
        try:
            run(engine, submits())
            raise AssertionError("nothing failed")
        except (ValueError, CommLost) as error:
            mesh.abort()
            failed, took = error, time.monotonic() - began
        if mesh.rank == 0:
            decisions[0].end()
        mend()
        formed.wait(DEADLINE)
        mesh.connect(STORE[0], 1, DEADLINE)
        runner.reset()
        engine, runner = make_e0_engine(folder, model=model, launcher=mesh.launcher, depth=depth)
        engine.overlap = Decided("all", mesh.rank, decisions[1])
        answers = run(engine, submits())
        assert any(plan.micro_batches > 1 for plan in runner.plans)
        engine.close()
        return failed, took, {number: answer.tokens for number, answer in answers.items()}

    import torch.distributed as dist

    STORE[:] = [dist.HashStore()]
    ran = on_ranks(Layout(tensor=2), work, timeout=DEADLINE)
    assert [type(error) for error, _, _ in ran] == [CommLost, ValueError]
    assert f"planted {where}" in str(ran[1][0])
    assert all(took < DEADLINE / 2 for _, took, _ in ran)
    engine, _ = make_e0_engine(folder)
    want = {number: answer.tokens for number, answer in run(engine, submits()).items()}
    assert [tokens for _, _, tokens in ran] == [want, want]


STORE: list[Any] = []


@pytest.mark.requirement("C13")
@mostly_slow("mode", ["prefill", "all"], ["all"])
@pytest.mark.slow
def test_a_rank_that_never_comes_is_noticed_at_the_deadline(folder: Path, mode: str) -> None:
    done = threading.Event()

    def work(mesh: Mesh) -> float:
        torch.set_num_threads(1)
        model = rank_model(folder, mesh)
        if mesh.rank == 1:
            assert done.wait(DEADLINE)
            return 0.0
        engine, _ = make_e0_engine(folder, model=model, launcher=mesh.launcher)
        engine.overlap = OverlapPolicy(mode)
        began = time.monotonic()
        with pytest.raises(CommLost):
            run(engine, submits())
        done.set()
        return time.monotonic() - began

    assert on_ranks(Layout(tensor=2), work, timeout=deadline(3.0))[0] < DEADLINE / 2


@pytest.mark.requirement("C13")
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_waited_for(folder: Path, slow: int) -> None:
    """Each layer of the rank takes a random time. Only the times change."""
    rng = random.Random(slow)

    def hold_up(mesh: Mesh, engine: Any, runner: Any) -> None:
        if mesh.rank != slow:
            return
        for block in runner._model.blocks:
            plain = block.attention.forward

            def late(*args: Any, plain: Any = plain) -> Any:
                time.sleep(rng.random() * 0.01)
                return plain(*args)

            block.attention.forward = late

    ran = on_engines(Layout(tensor=2), folder, submits, "all", each=hold_up)
    engine, _ = make_e0_engine(folder)
    want = {number: answer.tokens for number, answer in run(engine, submits()).items()}
    assert [one.tokens for one in ran] == [want, want]
    assert ran[0].overlapped
