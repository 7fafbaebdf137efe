"""C13: a thousand random steps in micro-batches against the same steps on one rank without overlap."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e0.rig import Answer, make_engine, submit
from tests.overlap.rig import Decided, Decisions, rank_model
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.ranks import on_ranks
from tests.support.slowness import deadline
from weft.engine.core import EngineCore
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout
from weft.types.sampling import TokenParams

SETTINGS: dict[str, Any] = {"blocks": 60, "chunk": 40, "max_num_seqs": 10, "depth": 1}


def drive_randomly(engine: EngineCore, steps: int, seed: int = 11) -> dict[int, Answer]:
    """Submit and abort requests at random, as a function of the arguments and the steps alone."""
    rng, answers, number = random.Random(seed), dict[int, Answer](), 0
    for _ in range(steps):
        for _ in range(rng.choice([0, 0, 0, 0, 1, 1, 3])):
            if sum(not answer.ends for answer in answers.values()) > 14:
                break
            number += 1
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 70))]
            params = TokenParams(
                temperature=rng.choice([0.0, 0.8]),
                max_tokens=rng.randrange(1, 25),
                logprobs=rng.choice([-1, 1]),
            )
            answers[number] = Answer()
            take(engine.submit(submit(number, prompt, params, request=number)), answers)
        live = [one for one, answer in answers.items() if not answer.ends]
        if live and rng.random() < 0.02:
            take(engine.finish(rng.choice(live)), answers)
        if engine.has_work():
            take(engine.step(), answers)
    while engine.has_work():
        take(engine.step(), answers)
    return answers


def take(events: Any, answers: dict[int, Answer]) -> None:
    for event in events:
        answer = answers[event.sequence]
        answer.tokens += event.token_ids
        if event.finish is not None:
            answer.ends.append(event.finish)


@pytest.mark.requirement("C13")
@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.grid)])
def test_random_steps(tmp_path: Path, steps: int) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    engine, alone = make_engine(folder, **SETTINGS)
    want = drive_randomly(engine, steps)
    decisions = Decisions()

    def work(mesh: Mesh) -> tuple[dict[int, Answer], int, int, int]:
        model = rank_model(folder, mesh)
        engine, runner = make_engine(folder, model=model, launcher=mesh.launcher, **SETTINGS)
        engine.overlap = Decided("all", mesh.rank, decisions)
        made = drive_randomly(engine, steps)
        overlapped = sum(plan.micro_batches > 1 for plan in runner.plans)
        engine.close()
        return made, len(runner.plans), overlapped, engine.stats().preemptions

    for made, number, overlapped, preemptions in on_ranks(Layout(tensor=2), work, timeout=deadline(120)):
        assert {n: (a.tokens, a.ends) for n, a in made.items()} == {
            n: (a.tokens, a.ends) for n, a in want.items()
        }
        assert number == len(alone.plans) >= steps
        assert overlapped > steps // 2
        assert preemptions
