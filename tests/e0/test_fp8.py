"""Exact tokens with an 8-bit cache: a sequence gets the tokens of a run alone.

The features are those of ``test_grid``. A few cases run here, with everything that can happen to a cache.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch

from tests.e0.rig import Answer, make_engine, run, submit
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.slow import mostly_slow
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

SHAPES = (
    "qwen3_moe",
    "qwen2_windowed",
    "deepseek_v3",
    "qwen3_next",
    "deepseek_v32",
    "deepseek_v4",
    "glm_dsa",
)
PARAMS = TokenParams(temperature=0.8, top_k=20, max_tokens=16)


def _prompts() -> list[list[int]]:
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    return [shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 25))] for _ in range(6)]


PROMPTS = _prompts()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fp8")
    return {shape: make_checkpoint(root, shape) for shape in SHAPES}


@functools.cache
def _alone(folder: Path, kv_cache_dtype: str) -> list[list[int]]:
    tokens = []
    for number, prompt in enumerate(PROMPTS):
        engine, _ = make_engine(folder, caching=False, max_num_seqs=1, kv_cache_dtype=kv_cache_dtype)
        tokens.append(run(engine, [[submit(1, prompt, PARAMS, request=number)]])[1].tokens)
        engine.close()
    return tokens


def _answers(folder: Path, **settings: object) -> tuple[list[Answer], object]:
    engine, runner = make_engine(folder, kv_cache_dtype="fp8", **settings)  # type: ignore[arg-type]
    dtypes = {tensor.dtype for layer in runner.cache for tensors in layer.values() for tensor in tensors}
    assert torch.float8_e4m3fn in dtypes
    arrivals: list[list[Submit]] = []
    for i, prompt in enumerate(PROMPTS):  # two steps apart: the last prompt finds blocks of the first
        arrivals += [[submit(i + 1, prompt, PARAMS, request=i)], []]
    found = run(engine, arrivals)
    engine.close()
    return [found[i + 1] for i in range(len(PROMPTS))], engine


@mostly_slow("shape", SHAPES, 1)
def test_same_tokens(shape: str, folders: dict[str, Path]) -> None:
    folder = folders[shape]
    expected = _alone(folder, "fp8")
    if shape != "qwen3_next":  # only one layer in four attends
        assert expected != _alone(folder, "auto"), "8 bits that change nothing prove nothing"
    for chunk, depth, policy, caching in (
        (0, 1, "mixed", False),
        (1, 2, "mixed", True),
        (7, 1, "exclusive", True),
        (16, 2, "mixed", False),
    ):
        answers, _ = _answers(folder, chunk=chunk, depth=depth, policy=policy, caching=caching)
        assert [answer.tokens for answer in answers] == expected, (chunk, depth, policy, caching)
        # Snapshots, and blocks of compressed entries, lie behind the common part of these prompts.
        if shape not in ("qwen3_next", "deepseek_v4"):
            assert any(answer.num_cached for answer in answers) == caching


@mostly_slow("shape", SHAPES, 2)
def test_same_tokens_after_preemption(shape: str, folders: dict[str, Path]) -> None:
    """Recomputed entries, in other chunks, are equal."""
    folder = folders[shape]
    # The window of DeepSeek V4 gives blocks back, so a smaller pool runs short.
    answers, engine = _answers(folder, blocks=14 if shape == "deepseek_v4" else 16, chunk=16)
    assert engine.stats().preemptions > 0  # type: ignore[attr-defined]
    assert [answer.tokens for answer in answers] == _alone(folder, "fp8")
