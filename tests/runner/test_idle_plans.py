"""A plan without rows, as idle replicas run, works in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slow import mostly_slow
from weft import LLM
from weft.cli.verify.tiny import FAMILIES, write_family
from weft.types.messages import Submit, ids_to_bytes
from weft.types.sampling import TokenParams


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("idle")

    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = write_family(root, family)
        return made[family]

    return of


@pytest.mark.requirement("C1", "F44")
@mostly_slow("dtype", ["float32", "float64"], ["float32"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_idle_steps_between_others_change_nothing(folders: Any, family: str, dtype: str) -> None:
    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "tokenizer": "spool-text",
        "dtype": dtype,
        "device": "cpu",
        "kv_cache_memory": "32M",
        "block_size": 8,
        "max_num_seqs": 2,
        "max_model_len": 64,
        "seed": 1,
    }

    with LLM(str(folders(family)), **settings) as llm:
        core: Any = llm._core

        def answer(sequence: int, idle: bool) -> list[int]:
            core.submit(
                Submit(
                    sequence=sequence,
                    request=sequence,
                    seed=3,
                    prompt_ids=ids_to_bytes([5, 6, 7, 8, 9, 10, 11]),
                    params=TokenParams(max_tokens=6),
                    salt=str(sequence),
                )
            )
            made: list[int] = []
            while core.has_work():
                if idle:
                    plan = core.scheduler.freeze(core.scheduler.idle())
                    handle = core.runner.forward(plan)
                    core.runner.sample(handle)
                    result = core.runner.read(handle)
                    assert len(result.tokens) == len(result.rows) == 0
                    assert core.scheduler.commit(plan, result, 0.0) == []
                made += [token for event in core.step() for token in event.token_ids]
            return made

        assert answer(1, idle=False) == answer(2, idle=True)
        assert core.stats().idle_steps == 6
