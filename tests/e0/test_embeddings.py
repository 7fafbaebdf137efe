"""Embeddings against the hidden states of transformers, for any batch and chunks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.e0.rig import Answer, make_engine, run, submit
from tests.e0.test_grid import FILLER, PROMPTS, SAMPLING
from tests.support.checkpoints import SHAPES, make_checkpoint, spread
from tests.support.expert_groups import on_layout
from tests.support.gpt_oss_models import CASES as GPT_OSS
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.slow import mostly_slow
from weft.config.sections.all import SpeculationSection
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

SEEDED = SAMPLING["seeded"]
ONE = TokenParams(max_tokens=1)
BATCH = 4
POOLING = ["last", "mean", "cls"]
WRITES = 5
"""Number of the sequence with output, behind the sequences of each pooling."""
CLOSE, DELTA = 2e-5, 3e-4
"""transformers normalizes in float32 for any weights, and computes a delta net entirely in float32."""


class Models:
    """Checkpoints, and the embeddings by transformers."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = cache(self._folder)
        self._reference = cache(self._load)
        self.states = cache(self._states)

    def _folder(self, shape: str) -> Path:
        if shape == "mtp":
            return make_mtp_checkpoint(self._root, skilled=True)
        if shape != "gpt_oss":
            return make_checkpoint(self._root, shape)
        torch.manual_seed(0)
        own = {"vocab_size": 113, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3}
        own |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
        settings = {**GPT_OSS["gpt-oss"][1], **own, "max_position_embeddings": 128}
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings)).to(torch.float64)
        spread(model)
        model.save_pretrained(self._root / shape)
        return self._root / shape

    def _load(self, shape: str) -> Any:
        folder = self.folder(shape)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        loaded.config._experts_implementation = "eager"
        return loaded.eval().base_model

    @torch.no_grad()
    def _states(self, shape: str, prompt: tuple[int, ...]) -> np.ndarray:
        """Return [tokens, hidden] after the final norm."""
        made = self._reference(shape)(torch.tensor([prompt]), use_cache=False).last_hidden_state
        return np.asarray(made[0].numpy())

    def check(self, shape: str, prompt: list[int], pooling: str, answer: Answer) -> None:
        states = self.states(shape, tuple(prompt))
        expected = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]
        assert answer.ends == ["stop"]
        assert answer.tokens == []
        got = np.frombuffer(answer.embedding, "<f4")
        bound = DELTA if "next" in shape else CLOSE
        np.testing.assert_allclose(got, expected, rtol=bound, atol=bound)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("embeddings"))


def pooled(first: int = 0) -> list[Submit]:
    """Return one sequence of each pooling for each prompt, and sequences with output."""
    made = []
    for n in range(BATCH):
        for place, pooling in enumerate(POOLING):
            number = first + 10 * n + place
            made.append(submit(number, PROMPTS[n], ONE, request=number, pooling=pooling))
        made.append(submit(first + 10 * n + WRITES, PROMPTS[n], SEEDED, request=n))
    return made


def check_all(models: Models, shape: str, answers: dict[int, Answer], first: int = 0) -> None:
    for n in range(BATCH):
        for place, pooling in enumerate(POOLING):
            models.check(shape, PROMPTS[n], pooling, answers[first + 10 * n + place])


OF_SHAPES = [*(s for s in SHAPES if s != "qwen3_next_wide"), "gpt_oss"]


@mostly_slow(("depth", "chunk"), [(1, 0), (2, 7)], [(2, 7)])
@mostly_slow("shape", OF_SHAPES, OF_SHAPES[:1])
def test_they_are_the_reference_s_hidden_states(shape: str, depth: int, chunk: int, models: Models) -> None:
    """In two rounds; the second round has cached prefixes."""
    engine, runner = make_engine(models.folder(shape), depth=depth, chunk=chunk, max_num_seqs=6)
    try:
        for first in (0, 1000):
            answers = run(engine, [pooled(first)])
            check_all(models, shape, answers, first)
            assert all(len(answers[first + 10 * n + WRITES].tokens) for n in range(BATCH))
    finally:
        engine.close()
    assert answers[1000 + 10 * (BATCH - 1)].num_cached > 0
    assert all(answers[1000 + 10 * n + place].num_cached == 0 for n in range(BATCH) for place in (1, 2))
    if depth == 2:
        assert runner.deepest == 2


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_beside_drafts(method: str, models: Models) -> None:
    speculation = SpeculationSection(
        speculative_method=method,  # type: ignore[arg-type]
        num_speculative_tokens=2,
        speculative_adaptive=False,
    )
    shape = "mtp" if method == "mtp" else "llama"
    engine, _ = make_engine(models.folder(shape), depth=2, chunk=7, speculation=speculation)
    answers = run(engine, [pooled()])
    engine.close()
    check_all(models, shape, answers)
    assert sum(engine.stats().drafts)


@mostly_slow("shape", ["qwen3_moe", "qwen3_next"], ["qwen3_next"])
def test_the_preempted_begin_again(shape: str, models: Models) -> None:
    engine, _ = make_engine(models.folder(shape), depth=2, chunk=5, blocks=16, max_num_seqs=4)
    filler = submit(999, FILLER, TokenParams(temperature=0.0, max_tokens=60), request=999, priority=-1)
    answers = run(engine, [[filler], *([one] for one in pooled())])
    engine.close()
    check_all(models, shape, answers)
    assert engine.stats().preemptions > 0


@mostly_slow("overlap", ["off", "all"], ["all"])
@pytest.mark.parametrize(("name", "shape"), [("tp2", "qwen3_moe"), ("dp2ep2", "deepseek_v4")])
def test_over_ranks(name: str, shape: str, overlap: str, models: Models) -> None:
    layout = {"tp2": Layout(tensor=2), "dp2ep2": Layout(data=2, expert=True)}[name]
    turns = [[one] for one in pooled()]
    arrivals = [turns] if layout.data == 1 else [turns[::2], turns[1::2]]
    replicas = on_layout(
        layout, models.folder(shape), arrivals, overlap=overlap, depth=2, chunk=16, max_num_seqs=12
    )
    answers = {number: one for replica in replicas for number, one in replica.answers.items()}
    check_all(models, shape, answers)
    if overlap == "all":
        assert sum(replica.overlapped for replica in replicas)
