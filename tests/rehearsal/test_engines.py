"""Whole engines on a rehearsed GPU: every family, with the scheduler's own plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e0 import rig as e0
from tests.models.conftest import CASES, make_checkpoint
from tests.rehearsal import rig
from tests.support import checkpoints, mtp_models
from weft.engine.core import EngineCore

#: Form of cache and of layers -> a configuration that has it, for every family and a few of its kinds.
FAMILIES = [
    "llama-biases-head-dim",
    "llama-yarn",
    "mistral-window",
    "mixtral",
    "qwen2-mixed-window",
    "qwen3",
    "qwen3-moe",
    "qwen3-next",
    "qwen3-5-moe",
    "gpt-oss",
    "deepseek-v2-groups-yarn",
    "deepseek-v3",
    "deepseek-v32",
    "glm-dsa",
    "deepseek-v4",
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            if name == "mtp":
                mtp_models.make_mtp_checkpoint(made[name], skilled=True)
            elif name in CASES:
                make_checkpoint(name, made[name])
            else:
                checkpoints.make_checkpoint(made[name], name)
        return made[name]

    return get


def rehearse(
    patch: pytest.MonkeyPatch, folder: Path, turns: Any = None, *, values: bool = False, **settings: Any
) -> tuple[Any, dict[int, e0.Answer], EngineCore]:
    """Serves ``turns`` on a rehearsed GPU: (the rehearsal, answers, the engine, closed)."""
    with rig.rehearsed(patch, values=values) as made:
        config = rig.config_of(folder, **settings)
        rig.Answers(made, patch, config.spec.vocab_size)
        core = EngineCore(config, progress=False)
        answers = rig.serve(core, made, turns or rig.few(config.spec.vocab_size))
        core.close()
    return made, answers, core


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs(name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, by the kernels: chunks, mixed steps, decode."""
    made, _, core = rehearse(monkeypatch, folder_of(name))
    assert not made.waited
    captured = core.runner.graphs
    print(name, captured and captured.replayed, {k: len(v) for k, v in made.variants.items()}, len(made.operators))


@pytest.mark.parametrize("name", ["llama", "qwen2_windowed", "qwen3_next", "mtp"])
def test_values_are_those_of_a_cpu(name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 every token, of all ways of sampling, is the CPU's."""
    folder, vocab = folder_of(name), checkpoints.VOCAB
    settings: dict[str, Any] = {"dtype": "float64", "max_model_len": 128}
    with monkeypatch.context() as patch:
        _, there, _ = rehearse(patch, folder, rig.arrivals(vocab), values=True, **settings)
    here = EngineCore(rig.config_of(folder, **{**settings, "device": "cpu"}), progress=False)
    expected = e0.run(here, rig.arrivals(vocab))
    here.close()
    assert {n: a.tokens for n, a in there.items()} == {n: a.tokens for n, a in expected.items()}
