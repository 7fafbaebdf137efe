"""Declared architectures with all features together, in float64: tokens equal those of sequences alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.composition import groups
from tests.composition.references import PLAIN, plain_of, tokens_are_those_alone
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
    "llama4-chunks",
    "gemma2",
    "phi",
    "granite-moe-shared",
)


def _save(folder: Path, name: str) -> None:
    family, changes = CASES[name]
    settings = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "max_position_embeddings": 192, **changes, "vocab_size": VOCAB}
    if "vocab_size_per_layer_input" in changes:
        settings["vocab_size_per_layer_input"] = VOCAB
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
    seen = tokens_are_those_alone(tmp_path, case)
    assert sum(seen.stats.drafts) > 0
    assert not case["preempt"] or seen.stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4-inputs", "gemma4-moe", "olmo3", "hunyuan", "llama4-chunks"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)])
def test_a_prefill_and_a_decode_group(name: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    """Also with layers that read the cache of another layer: only caches move."""
    _save(tmp_path, name)
    case = {**EVERYTHING, "blocks": "larger", "ranks": ranks, "overlap": False}
    expected, _ = run(tmp_path, plain_of(case), alone=True)
    made, seen = groups.run(tmp_path, case, None)
    assert made.keys() == expected.keys()
    assert all(made[key].tokens == expected[key].tokens for key in made)
    assert seen.decode.transfers is not None
    assert seen.decode.transfers.done > 0


def _add_module(folder: Path) -> None:
    """Add a module that predicts further tokens: a copy of the last layer, with random further weights."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = "model.layers.2."
    made = {name.replace(last, "model.layers.3."): t.clone() for name, t in tensors.items() if last in name}
    hidden = tensors["model.norm.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        made[f"model.layers.3.{name}.weight"] = hidden.clone()
    made["model.layers.3.eh_proj.weight"] = torch.randn(len(hidden), 2 * len(hidden), dtype=hidden.dtype) / 7
    save_file({**tensors, **made}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    config.pop("num_mtp_layers", None)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_drafts_of_the_module_of_a_row(tmp_path: Path) -> None:
    """GLM-4.5 publishes a module as the layer behind the last layer."""
    _save(tmp_path, "glm4-moe")
    _add_module(tmp_path)
    case = {**EVERYTHING, "draft": "mtp", "penalties": False}
    expected, _ = run(
        tmp_path, {**PLAIN, "n": 2, "penalties": False, "stop": False, "kv": "auto"}, alone=True
    )
    made, seen = run(tmp_path, case)
    assert {key: one.tokens for key, one in made.items()} == {
        key: one.tokens for key, one in expected.items()
    }
    assert sum(seen.stats.drafts) > 0
