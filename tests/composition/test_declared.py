"""Declared architectures with all features together, in float64: tokens equal those of sequences alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.composition.references import PLAIN
from tests.composition.rig import MAX_LEN, VOCAB, run
from tests.support.checkpoints import spread
from tests.support.declared_models import CASES
from weft.bench.bench_tokenizer import write_tokenizer

Case = dict[str, Any]
EVERYTHING: Case = {
    "policy": "mixed",
    "chunk": 5,
    "prefix": True,
    "depth": 2,
    "draft": "ngram",
    "preempt": False,
    "logprobs": True,
    "n": 2,
    "penalties": True,
    "stop": False,
    "kv": "auto",
}
OTHERS: Case = {**EVERYTHING, "chunk": 0, "depth": 1, "preempt": True, "n": 1, "kv": "fp8"}
#: Rows with distinct traits. The first runs by default.
NAMES = (
    "gemma4-inputs",
    "gemma4-moe",
    "olmo3",
    "gemma3",
    "ministral3",
    "hunyuan",
    "ernie-moe",
    "cohere2",
    "llama4",
    "phi",
    "granite-moe-shared",
)


def _save(folder: Path, name: str) -> None:
    family, changes = CASES[name]
    settings = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "max_position_embeddings": 192, **changes, "vocab_size": VOCAB}
    if "vocab_size_per_layer_input" in changes:
        settings["vocab_size_per_layer_input"] = VOCAB
    if "attention_chunk_size" in changes:
        settings["attention_chunk_size"] = 192
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(3)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).to(torch.float64)
    spread(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB, MAX_LEN)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[] if name == NAMES[0] and at == 0 else [pytest.mark.slow])
        for name in NAMES
        for at, case in enumerate((EVERYTHING, OTHERS))
    ],
)
def test_tokens_are_those_of_each_sequence_alone(name: str, case: Case, tmp_path: Path) -> None:
    _save(tmp_path, name)
    kept = ("n", "penalties", "stop", "kv")
    expected, _ = run(tmp_path, {**PLAIN, **{feature: case[feature] for feature in kept}}, alone=True)
    made, seen = run(tmp_path, case)
    assert made.keys() == expected.keys()
    assert len({answer.tokens for answer in made.values()}) > 4, "the model says the same to every prompt"
    for key, answer in made.items():
        assert answer.tokens == expected[key].tokens, key
    assert seen.stats.mixed_steps > 0
    assert seen.stats.prefix_hits > 0
    assert sum(seen.stats.drafts) > 0
    assert not case["preempt"] or seen.stats.preemptions > 0
