"""Replicas that share experts agree on micro-batches; each has its own pair, or two empty ones."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import make_engine, run, submit
from tests.overlap.rig import rank_model
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.engine.expert_group import ExpertGroup
from weft.overlap.overlap_policy import OverlapPolicy
from weft.parallel.agreement import AgreementGroup
from weft.parallel.mesh import Mesh
from weft.parallel.wakeup import LocalWakeups
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.plan import StepPlan
from weft.types.sampling import TokenParams

DEADLINE = deadline(60.0)
LAYOUT = Layout(data=2, expert=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "qwen3_moe")


def request(number: int, prompt: int, tokens: int) -> Submit:
    ids = [(7 * number + 5 * i) % VOCAB for i in range(prompt)]
    return submit(number, ids, TokenParams(temperature=0.8, max_tokens=tokens), request=number)


#: Requests of replica 0 and of replica 1.
LOADS = {
    "one of many tokens, and two": ([request(1, 60, 1)], [request(2, 9, 1), request(3, 5, 1)]),
    "one idle": ([request(1, 60, 5), request(2, 20, 5)], []),
    "one that cannot split": ([request(1, 60, 1)], [request(2, 9, 1)]),
    "both busy": (
        [request(n, 10 + 7 * n, 4 + n) for n in range(1, 5)],
        [request(n, 3 + 5 * n, 9 - n) for n in range(5, 9)],
    ),
}


def serve(folder: Path, load: str, mode: str, form: str) -> list[tuple[dict[int, list[int]], list[StepPlan]]]:
    """By replica: tokens of each request, and the plans."""
    wakeups, submits = LocalWakeups(2), LOADS[load]
    left, lock = [sum(map(len, submits))], threading.Lock()

    def work(mesh: Mesh) -> tuple[dict[int, list[int]], list[StepPlan]]:
        torch.set_num_threads(1)
        model = rank_model(folder, mesh, dispatch=form)
        engine, runner = make_engine(folder, model=model, launcher=mesh.launcher)
        engine.overlap = OverlapPolicy(mode)
        group = AgreementGroup(mesh.rank, 2, wakeups.of(mesh.rank))
        group.connect(STORE[0], 0, DEADLINE)
        engine.expert_group = ExpertGroup(group)
        tokens: dict[int, list[int]] = {}
        began = time.monotonic()
        for one in submits[mesh.rank]:
            engine.submit(one)
        while left[0] or engine.has_work():
            assert time.monotonic() - began < DEADLINE, "the domain hangs"
            if not engine.has_work():
                time.sleep(0.001)
                continue
            for event in engine.step():
                tokens.setdefault(event.sequence, []).extend(event.token_ids)
                if event.finish is not None:
                    with lock:
                        left[0] -= 1
        plans = getattr(runner, "plans", [])
        return tokens, plans

    import torch.distributed as dist

    STORE[:] = [dist.HashStore()]
    return on_ranks(LAYOUT, work, timeout=DEADLINE)


STORE: list[Any] = []


@pytest.mark.requirement("C2", "C13")
@pytest.mark.parametrize("load", list(LOADS))
@mostly_slow(
    ("mode", "form"),
    [("all", "throughput"), ("prefill", "low-latency"), ("all", "gather"), ("off", "auto")],
    [("all", "throughput"), ("prefill", "low-latency")],
)
def test_tokens_are_those_of_one_rank(folder: Path, load: str, mode: str, form: str) -> None:
    made = serve(folder, load, mode, form)
    engine, _ = make_engine(folder)
    want = {n: a.tokens for n, a in run(engine, [[*LOADS[load][0], *LOADS[load][1]]]).items()}
    assert {**made[0][0], **made[1][0]} == want
    micro_batches = [[plan.micro_batches for plan in plans] for _, plans in made]
    assert micro_batches[0] == micro_batches[1], "agreed"
    first = made[0][1][0], made[1][1][0]
    if mode == "off":
        assert set(micro_batches[0]) == {1}
    elif load == "one that cannot split":
        # Exception: a replica came a step late, so that the other was alone and split.
        assert micro_batches[0][0] == 1 or not all(plan.rows for plan in first)
    elif load == "one idle":
        assert 2 in micro_batches[0]
        assert not any(plan.rows for plan in made[1][1])
    else:
        assert 2 in micro_batches[0]
