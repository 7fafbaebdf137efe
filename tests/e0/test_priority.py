"""Exact tokens with priorities, for any order of sequences and any preemptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e0.rig import make_engine, run, submit
from tests.e0.test_grid import PROMPTS, SAMPLING
from tests.support.checkpoints import make_checkpoint
from weft.scheduler import crowding
from weft.scheduler.policy import queue

PARAMS = SAMPLING["seeded"]
COUNT = 10
PRIORITIES = [3, 0, 7, -2, 0, 3, 1, -5, 7, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("priority"), "qwen3_moe")


@pytest.mark.parametrize("depth", [1, 2])
def test_priorities_change_no_token(depth: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "TURN", 4)
    monkeypatch.setattr(queue, "PASSES", 3)
    engine, _ = make_engine(folder, caching=False, max_num_seqs=1)
    alone = [run(engine, [[submit(n, PROMPTS[n], PARAMS, request=n)]])[n].tokens for n in range(COUNT)]
    engine.close()
    engine, _ = make_engine(folder, depth=depth, blocks=24, max_num_seqs=3)
    submits = [[submit(n, PROMPTS[n], PARAMS, request=n, priority=PRIORITIES[n])] for n in range(COUNT)]
    answers = run(engine, [[*submits[0], *submits[1], *submits[2]], [], [], [], *submits[3:]])
    engine.close()
    assert [answers[n].tokens for n in range(COUNT)] == alone
    assert engine.stats().preemptions > 0
