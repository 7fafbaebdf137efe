"""Identical reruns of a scaled-down W1 (many prompts at once, greedy) give identical tokens and logits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.e0.rig import run, submit
from tests.e1.rig import VOCAB, Bits, make_checkpoint, make_engine
from tests.support.slow import mostly_slow
from weft.types.sampling import TokenParams

RERUNS = 4


def once(folder: Path, dtype: str, form: str) -> tuple[dict[int, list[int]], Bits]:
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(64)] for _ in range(16)]
    params = TokenParams(temperature=0.0, max_tokens=24)
    engine, runner = make_engine(folder, dtype, form, depth=2)
    try:
        answers = run(engine, [[submit(i, ids, params, request=i) for i, ids in enumerate(prompts)]])
    finally:
        engine.close()
    return {sequence: answer.tokens for sequence, answer in answers.items()}, runner.bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@mostly_slow("form", ["cpp", "fallback"], ["cpp"])
def test_reruns_are_identical(form: str, dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    tokens, bits = once(folder, dtype, form)
    assert all(len(made) == 24 for made in tokens.values())
    for _ in range(RERUNS):
        again, again_bits = once(folder, dtype, form)
        assert again == tokens
        assert again_bits.keys() == bits.keys()
        assert all(
            torch.equal(a, b)
            for key, rows in bits.items()
            for a, b in zip(again_bits[key], rows, strict=True)
        )
