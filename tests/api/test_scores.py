"""Scores, classes and layouts of embedding models, by ``LLM``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from tests.support.text_folders import byte_alphabet
from weft import LLM
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.families import load_spec
from weft.text.scoring import INSTRUCTION

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 299,
    "max_position_embeddings": 1024,
}
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "kv_cache_memory": "16M",
    "block_size": 8,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "device": "cpu",
    "seed": 1,
}
TEXTS = ["a cat sits", "two cats sit", "rain in May"]
NO, YES = ord("n"), ord("y")


def write_tokenizer(folder: Path, ends: bool = False) -> tokenizers.Tokenizer:
    """Write a tokenizer of bytes with a pair form, and with ``ends`` a token behind each text."""
    made = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    made.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("<think>", "</think>")])
    end = " </s>" if ends else ""
    ids = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{end}", pair=f"<s> $A <s> $B{end}", special_tokens=ids
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return made


def save(folder: Path, family: str = "Qwen3", task: str = "ForCausalLM", **settings: Any) -> Any:
    """Save a random checkpoint in float64. Return the model in transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
    model = getattr(transformers, f"{family}{task}")(config).to(torch.float64).eval()
    model.save_pretrained(folder)
    return model


def numbers_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].numpy())


@pytest.mark.parametrize(
    ("problem", "rule"),
    [
        (None, lambda x: np.exp(x) / np.exp(x).sum()),
        ("multi_label_classification", lambda x: 1 / (1 + np.exp(-x))),
        ("regression", lambda x: x),
    ],
)
def test_numbers_become_probabilities_by_the_kind_of_problem(tmp_path: Path, problem: Any, rule: Any) -> None:
    names = {0: "calm", 1: "glad", 2: "sad"}
    model = save(tmp_path, task="ForSequenceClassification", id2label=names, problem_type=problem)
    tokenizer = write_tokenizer(tmp_path)
    with LLM(model=str(tmp_path), **SETTINGS) as llm:
        made = llm.classify(TEXTS, use_tqdm=False)
        raw = llm.classify(TEXTS, use_activation=False, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="3 classes"):
            llm.score("a", "b", use_tqdm=False)
        with pytest.raises(InvalidRequest, match="no output head"):
            llm.generate("a", use_tqdm=False)
    for text, one, plain in zip(TEXTS, made, raw, strict=True):
        ids = tokenizer.encode(text).ids
        assert one.prompt_token_ids == ids
        expected = numbers_of(model, ids)
        np.testing.assert_allclose(plain.probs, expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(one.probs, rule(expected), rtol=5e-5, atol=5e-5)
        assert one.label == names[int(expected.argmax())]


def test_a_classifier_with_one_label_scores_pairs(tmp_path: Path) -> None:
    model = save(tmp_path, "Llama", "ForSequenceClassification", num_labels=1)
    tokenizer = write_tokenizer(tmp_path)
    with LLM(model=str(tmp_path), **SETTINGS) as llm:
        made = llm.score("cats?", TEXTS, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="instruction"):
            llm.score("cats?", TEXTS, instruction="judge", use_tqdm=False)
        with pytest.raises(InvalidRequest, match="one query for each document"):
            llm.score(["a", "b"], TEXTS, use_tqdm=False)
    for text, one in zip(TEXTS, made, strict=True):
        (number,) = numbers_of(model, tokenizer.encode("cats?", text).ids)
        assert one.score == pytest.approx(1 / (1 + np.exp(-number)), abs=5e-5)


def test_a_reranker_of_two_tokens_has_the_published_prompt(tmp_path: Path) -> None:
    model = save(tmp_path)
    tokenizer = write_tokenizer(tmp_path)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    with LLM(model=str(tmp_path), hf_overrides=overrides, **SETTINGS) as llm:
        made = llm.score("cats?", TEXTS, use_tqdm=False)
        own = llm.score("cats?", TEXTS, instruction="Find dogs", use_tqdm=False)
        assert llm.generate("cats?", use_tqdm=False)[0].finished

    def expected(text: str, instruction: str) -> float:
        """Return the score by the steps of the model's publication."""
        before = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
            'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n"
        )
        behind = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        pair = f"<Instruct>: {instruction}\n<Query>: cats?\n<Document>: {text}"
        parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in (before, pair, behind)]
        last = numbers_of(model, [*parts[0], *parts[1], *parts[2]])[-1][[NO, YES]]
        return float(np.exp(last[1]) / np.exp(last).sum())

    for text, one, other in zip(TEXTS, made, own, strict=True):
        assert one.score == pytest.approx(expected(text, INSTRUCTION), abs=5e-5)
        assert other.score == pytest.approx(expected(text, "Find dogs"), abs=5e-5)


def test_other_models_score_by_the_cosine(llm: LLM) -> None:
    first, *others = (one.embedding for one in llm.embed(["cats?", *TEXTS], use_tqdm=False))
    made = llm.score("cats?", TEXTS, use_tqdm=False)
    np.testing.assert_allclose([one.score for one in made], [first @ other for other in others], atol=1e-5)
    (alike,) = llm.score("cats?", "cats?", use_tqdm=False)
    assert alike.score == pytest.approx(1.0)
    with pytest.raises(InvalidRequest, match="no classes"):
        llm.classify("a", use_tqdm=False)


def layout(folder: Path, modules: list[str], **pooling: bool) -> None:
    """Write the layout of sentence-transformers."""
    named = [f"sentence_transformers.models.{name}" for name in modules]
    listed = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind.rpartition('.')[2]}" if n else "", "type": kind}
        for n, kind in enumerate(named)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("plain")
    model = save(folder, "Qwen2", "Model", matryoshka_dimensions=[8, 16])
    return folder, model, write_tokenizer(folder, ends=True)


@pytest.mark.parametrize(
    ("field", "normal", "rule"),
    [
        ("pooling_mode_mean_tokens", True, lambda states: states.mean(0)),
        ("pooling_mode_cls_token", False, lambda states: states[0]),
        ("pooling_mode_lasttoken", False, lambda states: states[-1]),
    ],
)
def test_the_layout_names_the_pooling(
    tmp_path: Path, plain: tuple[Path, Any, Any], field: str, normal: bool, rule: Any
) -> None:
    folder, model, tokenizer = plain
    shutil.copytree(folder, tmp_path / "m")
    layout(
        tmp_path / "m", ["Transformer", "Pooling", *["Normalize"] * normal], **{field: True, "other": False}
    )
    with LLM(model=str(tmp_path / "m"), **SETTINGS) as llm:
        made = llm.embed(TEXTS, use_tqdm=False)
        short = llm.embed(TEXTS, dimensions=8, normalize=True, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="one of: 8, 16, 32"):
            llm.embed(TEXTS, dimensions=9, use_tqdm=False)
    for text, one, cut in zip(TEXTS, made, short, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].numpy()
        expected = rule(states)
        np.testing.assert_allclose(cut.embedding, expected[:8] / np.linalg.norm(expected[:8]), atol=2e-5)
        expected = expected / np.linalg.norm(expected) if normal else expected
        np.testing.assert_allclose(one.embedding, expected, rtol=2e-5, atol=2e-5)


def test_layouts_that_are_refused_by_name(tmp_path: Path, plain: tuple[Path, Any, Any]) -> None:
    for name, modules, pooling, said in (
        ("dense", ["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "a module Dense"),
        ("max", ["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
    ):
        folder = tmp_path / name
        shutil.copytree(plain[0], folder)
        layout(folder, modules, **pooling)
        with LLM(model=str(folder), **SETTINGS) as llm:
            with pytest.raises(InvalidRequest, match=said):
                llm.embed("a", use_tqdm=False)
            assert llm.embed("a", pooling="mean", use_tqdm=False)[0].error is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ({"rope_theta": 3}, "cannot set 'rope_theta'"),
        ({"classifier_from_token": ["never"]}, "'never'"),
        ({"classifier_from_token": "y"}, "list of tokens"),
        ({"classifier_from_token": ["y"], "method": "from_2_way_softmax"}, "two tokens"),
        ({"classifier_from_token": ["y"], "method": "other"}, "'other' is not supported"),
    ],
)
def test_overrides_that_are_refused(plain: tuple[Path, Any, Any], overrides: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(model=str(plain[0]), hf_overrides=overrides, **SETTINGS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 100, "tie_word_embeddings": True}, "outside of the model's vocabulary"),
        ({}, "no output head"),
    ],
)
def test_tokens_without_logits_are_refused(
    tmp_path: Path, plain: tuple[Path, Any, Any], changes: Any, said: str
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(plain[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=said):
        load_spec(str(folder), overrides={"classifier_from_token": ["y"]})
