"""New weights of experts that have moved, or have copies, on other ranks than at the start."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e0.rig import submit
from tests.e1.rig import MAX_LEN, make_checkpoint
from tests.support.new_weights import changed, read_tensors, write_checkpoint
from tests.support.slowness import deadline
from weft.common.errors import Unavailable
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.engine.core import EngineCore
from weft.types.sampling import TokenParams
from weft.types.weights import StageWeights, UseWeights, WeightsUpdate

pytestmark = pytest.mark.slow

PROMPT = [(5 * i + 3) % 7 for i in range(40)]
"""Few different tokens, so that few experts have most rows."""


def start(folder: Path, **more: Any) -> EngineCore:
    """Start an engine of two ranks that moves experts with every other step. ``folder``: of the model."""
    given: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": "spool-text",
        "dtype": "float64",
        "device": "cpu",
        "threads": 1,
        "max_model_len": MAX_LEN,
        "kv_cache_memory": "16M",
        "max_num_seqs": 4,
        "block_size": 16,
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "eplb_interval": 2,
        "redundant_experts": 2,
    }
    return EngineCore(resolve(from_keywords(given | more)), progress=False)


def tokens(core: EngineCore, number: int, count: int = 24) -> list[int]:
    """Return greedy tokens after ``PROMPT``."""
    params = TokenParams(temperature=0.0, max_tokens=count)
    assert not core.submit(submit(number, PROMPT, params, request=number))
    made: list[int] = []
    until = time.monotonic() + deadline(60)
    while True:
        assert time.monotonic() < until
        core.check()
        for event in (*core.poll(), *(core.step() if core.has_work() else ())):
            assert event.error is None
            made += event.token_ids
            if event.finish is not None:
                return made


def hear(core: EngineCore) -> None:
    core.check()
    core.poll()
    if core.recovering:
        core.step()


def placements(core: EngineCore) -> Any:
    """Return the places of all experts, as the engine's rank knows them."""
    model = core.runner._runner._model  # type: ignore[attr-defined]
    return model.experts.placements


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Return three checkpoints: "old", "new", and "mixed", which is "new" with the routed layer 1 of a third.
    "part" has this layer alone."""
    (tmp_path / "made").mkdir()
    old = Path(make_checkpoint(tmp_path / "made", "qwen3_moe"))
    tensors = read_tensors(old)
    new = changed(tensors, 1)
    part = {name: one for name, one in changed(tensors, 2).items() if ".layers.1.mlp." in name}
    return {
        "old": old,
        "new": write_checkpoint(tmp_path / "new", old, new),
        "mixed": write_checkpoint(tmp_path / "mixed", old, new | part),
        "part": write_checkpoint(tmp_path / "part", old, part),
    }


def update(core: EngineCore, version: int, folder: Path, partial: bool = False) -> None:
    files = (str(folder / "model.safetensors"),)
    core.weights.update(WeightsUpdate(version=version, files=files, partial=partial), lambda: hear(core))


def expected(folder: Path) -> list[int]:
    core = start(folder, enable_expert_parallel=False, eplb_interval=0, redundant_experts=0)
    try:
        return tokens(core, 0)
    finally:
        core.close()


def test_experts_get_new_weights_where_they_are(folders: dict[str, Path]) -> None:
    """Before and after a loss of a rank, which reads its experts of both updates again."""
    due = {name: expected(folders[name]) for name in ("old", "new", "mixed")}
    assert len({str(one) for one in due.values()}) == 3
    core = start(folders["old"])
    try:
        at_start = placements(core)
        assert tokens(core, 0) == due["old"]
        moved = placements(core)
        assert moved != at_start
        update(core, 1, folders["new"])
        assert placements(core) == moved
        assert tokens(core, 1) == due["new"]
        update(core, 2, folders["part"], partial=True)
        assert tokens(core, 2) == due["mixed"]
        processes = core.runner.processes
        assert processes is not None
        os.kill(processes.pid(1), signal.SIGKILL)
        assert tokens(core, 3) == due["mixed"]
        assert core.stats().recoveries == 1
        update(core, 3, folders["old"])
        assert tokens(core, 4) == due["old"]
    finally:
        core.close()


def test_experts_that_move_between_the_phases_are_noticed(folders: dict[str, Path]) -> None:
    core = start(folders["old"])
    try:
        due = tokens(core, 0, 3)
        files = (str(folders["new"] / "model.safetensors"),)
        core.weights.begin(StageWeights(update=WeightsUpdate(version=1, files=files)))
        until = time.monotonic() + deadline(60)
        while not core.weights.finished():
            assert time.monotonic() < until
            hear(core)
        before = placements(core)
        for number in range(1, 9):
            if placements(core) != before:
                break
            tokens(core, number, 2 * number)
        assert placements(core) != before
        core.weights.begin(UseWeights(version=1))
        core.weights.take(core.scheduler)
        (answer,) = core.weights.finished()
        assert answer.error is not None
        assert answer.error.code == Unavailable("").info().code
        assert answer.version == 0
        assert tokens(core, 20, 3) == due
        update(core, 1, folders["new"])
    finally:
        core.close()
