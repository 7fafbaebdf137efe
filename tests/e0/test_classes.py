"""Classes against transformers in float64, for any batch, chunks and ranks."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.e0.rig import make_engine, run, submit
from tests.e0.test_grid import PROMPTS, SAMPLING
from tests.support.checkpoints import make_checkpoint
from tests.support.expert_groups import on_layout
from tests.support.slow import mostly_slow
from weft.common.errors import InvalidRequest
from weft.scheduler.validate import check_submit
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

ONE = TokenParams(max_tokens=1)
BATCH, LABELS = 4, 5
CLOSE = 2e-5
"""transformers normalizes in float32 for any weights."""
FAMILIES = ["Llama", "Qwen2", "Qwen3"]
_SIZES = {
    "vocab_size": 113,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "num_labels": LABELS,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classes")


@cache
def saved(root: Path, family: str, tied: bool) -> tuple[Path, Any]:
    """Return (folder of a random classifier, the classifier in transformers)."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SIZES, tie_word_embeddings=tied)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).to(torch.float64).eval()
    folder = root / f"{family}-{tied}"
    model.save_pretrained(folder)
    return folder, model


def check(model: Any, prompt: list[int], embedding: bytes) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    got = np.frombuffer(embedding, "<f4")
    assert got.shape == (LABELS,)
    np.testing.assert_allclose(got, expected, rtol=CLOSE, atol=CLOSE)


def asked(first: int, pooling: str) -> list[Submit]:
    """Return a classification of each prompt, and an embedding of each."""
    classes = [submit(first + n, PROMPTS[n], ONE, request=first + n, pooling=pooling) for n in range(BATCH)]
    numbers = range(first + 50, first + 50 + BATCH)
    return [
        *classes,
        *(submit(n, PROMPTS[n - first - 50], ONE, request=n, pooling="last") for n in numbers),
    ]


@pytest.mark.parametrize("family", FAMILIES)
@mostly_slow(("depth", "chunk"), [(1, 0), (2, 7)], [(2, 7)])
def test_a_classifier_gives_the_reference_s_numbers(family: str, depth: int, chunk: int, root: Path) -> None:
    """In two rounds; the second round has cached prefixes."""
    folder, model = saved(root, family, tied=family == "Qwen3")
    engine, _ = make_engine(folder, depth=depth, chunk=chunk, max_num_seqs=6)
    try:
        for first in (0, 1000):
            answers = run(engine, [asked(first, "classify")])
            for n in range(BATCH):
                check(model, PROMPTS[n], answers[first + n].embedding)
                assert len(answers[first + 50 + n].embedding) == 4 * _SIZES["hidden_size"]
        assert answers[1000 + BATCH - 1].num_cached > 0
    finally:
        engine.close()


def by_tokens(root: Path, **fields: Any) -> tuple[Path, Any]:
    """Return (folder of a generating model that classifies by tokens, the model in transformers)."""
    folder = make_checkpoint(root, "llama")
    target = root / "-".join(["tokens", *fields])
    if not target.exists():
        shutil.copytree(folder, target)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **fields}))
        (target / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 9, "yes": 17, "x": 2}}}))
    return target, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_logits_of_tokens_are_numbers(tensor: int, root: Path) -> None:
    """Over ranks, too: each rank has a part of the vocabulary."""
    folder, model = by_tokens(root, classifier_from_token=["x", "no", "yes"])
    turns = [asked(0, "classify")]
    (replica,) = on_layout(Layout(tensor=tensor), folder, [turns], depth=2, chunk=16, max_num_seqs=12)
    for n in range(BATCH):
        with torch.no_grad():
            expected = model(torch.tensor([PROMPTS[n]])).logits[0, -1, [2, 9, 17]].numpy()
        got = np.frombuffer(replica.answers[n].embedding, "<f4")
        np.testing.assert_allclose(got, expected, rtol=CLOSE, atol=CLOSE)


def test_two_tokens_give_one_number_and_the_model_still_generates(root: Path) -> None:
    folder, model = by_tokens(root, classifier_from_token=["no", "yes"], method="from_2_way_softmax")
    engine, _ = make_engine(folder, depth=1, chunk=0, max_num_seqs=6)
    written = submit(99, PROMPTS[0], SAMPLING["seeded"], request=99)
    answers = run(engine, [[*asked(0, "classify"), written]])
    engine.close()
    for n in range(BATCH):
        with torch.no_grad():
            no, yes = model(torch.tensor([PROMPTS[n]])).logits[0, -1, [9, 17]].tolist()
        (got,) = np.frombuffer(answers[n].embedding, "<f4")
        assert got == pytest.approx(yes - no, abs=CLOSE)
    assert answers[99].tokens


def test_a_model_without_classes_refuses() -> None:
    one = submit(1, PROMPTS[0], ONE, request=1, pooling="classify")
    assert check_submit(one, 113, 96, classifies=True)[1] == len(PROMPTS[0])
    with pytest.raises(InvalidRequest, match="no classes"):
        check_submit(one, 113, 96)
