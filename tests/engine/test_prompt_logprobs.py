"""Prompt and output logprobs against transformers, whole and in chunks, alone and batched."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e0.rig import make_engine, submit
from tests.support.checkpoints import SHAPES, VOCAB, make_checkpoint
from tests.support.slow import mostly_slow
from weft.types.messages import LogprobColumns, Submit
from weft.types.sampling import TokenParams

TOP = 4
PARAMS = TokenParams(temperature=0.0, max_tokens=6, logprobs=TOP, prompt_logprobs=TOP)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logprobs")


def theirs(folder: Path, ids: list[int]) -> np.ndarray:
    """Return log_softmax [len(ids), vocab] in float32, computed by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def collect(engine_events: list[LogprobColumns]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parts = [columns.arrays() for columns in engine_events]
    return tuple(np.concatenate([part[i] for part in parts]) for i in range(3))  # type: ignore[return-value]


@mostly_slow("chunk", [0, 5], [5])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_logprobs_are_the_references(root: Path, shape: str, chunk: int) -> None:
    folder = root / shape if (root / shape).exists() else make_checkpoint(root, shape)
    rng = random.Random(8)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 23, 40)]
    engine, _ = make_engine(folder, chunk=chunk, depth=2)
    submits: list[Submit] = [submit(i, ids, PARAMS, request=i) for i, ids in enumerate(prompts)]
    for one in submits:
        engine.submit(one)
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    of_prompt: dict[int, list[LogprobColumns]] = {i: [] for i in range(len(prompts))}
    of_output: dict[int, list[LogprobColumns]] = {i: [] for i in range(len(prompts))}
    while engine.has_work():
        for event in engine.step():
            tokens[event.sequence] += event.token_ids
            if event.prompt_logprobs is not None:
                of_prompt[event.sequence].append(event.prompt_logprobs)
            if event.logprobs is not None:
                of_output[event.sequence].append(event.logprobs)
    engine.close()
    for i, prompt in enumerate(prompts):
        ids = prompt + tokens[i]
        expected = theirs(folder, ids)
        if len(prompt) > 1:
            check(collect(of_prompt[i]), expected[: len(prompt) - 1], ids[1 : len(prompt)])
        check(collect(of_output[i]), expected[len(prompt) - 1 : -1], tokens[i])


def check(found: tuple[np.ndarray, np.ndarray, np.ndarray], expected: np.ndarray, own: list[int]) -> None:
    """Check (ids [n, 1 + top], values, rank) against the reference rows, one for each token of ``own``."""
    ids, values, rank = found
    assert ids[:, 0].tolist() == own
    assert ids.shape == (len(own), 1 + TOP)
    # transformers computes in float32; a delta net with extreme weights turns its rounding into 3e-4.
    near = max(1e-4, 3e-5 * float(np.abs(expected).max()))
    np.testing.assert_allclose(values, np.take_along_axis(expected, ids, 1), atol=near)
    np.testing.assert_allclose(values[:, 1:], -np.sort(-expected, axis=1)[:, :TOP], atol=near)
    own_values = np.take_along_axis(expected, ids[:, :1], 1)
    assert (rank - 1 <= (expected > own_values - near).sum(1)).all()
    assert (rank - 1 >= (expected > own_values + near).sum(1)).all()
