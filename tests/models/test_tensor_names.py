"""The weight map of each architecture places the tensor names of published checkpoints, and lacks none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.models.conftest import make_checkpoint
from tests.support.delta_models import as_published
from tests.support.tensor_names import MAPPING, Names, config_of, expanded, load
from weft.config.families import FAMILIES, load_spec
from weft.config.spec import ModelSpec
from weft.models import loader
from weft.models.quantized.sources import part_of
from weft.models.registry import WEIGHTS
from weft.models.weights import WeightMap

LISTS = load()
LLAMA_CPP = {
    "arcee": "ARCEE",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "cwm": "LLAMA",
    "dots1": "DOTS1",
    "ernie": "ERNIE4_5",
    "glm": "CHATGLM",
    "granite": "GRANITE",
    "hunyuan": "HUNYUAN_DENSE",
    "hunyuan-moe": "HUNYUAN_MOE",
    "lfm2": "LFM2",
    "ministral3": "MISTRAL3",
    "olmo3": "OLMO2",
    "phi": "PHI2",
    "seed-oss": "SEED_OSS",
    "solar-open": "GLM4_MOE",
    "starcoder2": "STARCODER2",
}
"""Lists of the conversion mapping of transformers with names that the converter of llama.cpp reads, too:
name -> key of ``gguf.MODEL_ARCH``. The converter reads published files, not what transformers saves."""
_LAYER = re.compile(r"(?<=layers\.)(\d+)")


def spec_of(name: str, listed: Names, folder: Path) -> ModelSpec:
    config = config_of(name)
    text = {**config.get("text_config", {}), **listed.config.get("text_config", {})}
    config |= listed.config | ({"text_config": text} if text else {})
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(str(folder), language_model_only=True)


def placed(listed: Names, spec: ModelSpec) -> tuple[WeightMap, dict[str, list[str]]]:
    """Return the map in the names of the list, and the weights of each pattern in all layers."""
    weights: WeightMap = WEIGHTS.get(spec.family)(spec)
    # A layer of one part counts in the names, and not in the spec.
    layers = 1 + max(int(found[1]) for one in weights.placements if (found := _LAYER.search(one)))
    experts = 0 if spec.moe is None else spec.moe.experts
    names = {pattern: list(expanded(pattern, layers, experts)) for pattern in listed.patterns()}
    weights = weights.published_as({one for each in names.values() for one in each})
    # A part of a quantized weight, as the blocks of GPT-OSS, counts as the weight.
    quantized = spec.quantized is not None
    parts = {
        pattern: [
            one if (found := part_of(one, weights.placements, quantized)) is None else found[0]
            for one in each
        ]
        for pattern, each in names.items()
    }
    return weights, parts


def fits(weights: WeightMap, name: str) -> bool:
    return name in weights.placements or loader._without_effect(name, weights, range(0), quantized=False)


@pytest.mark.parametrize("name", list(LISTS))
def test_every_published_name_is_placed_and_none_is_missing(name: str, tmp_path: Path) -> None:
    """A pattern may be of some layers only, so one layer with the name is enough."""
    weights, names = placed(LISTS[name], spec_of(name, LISTS[name], tmp_path))
    unknown = [pattern for pattern, each in names.items() if not any(fits(weights, one) for one in each)]
    assert not unknown
    assert not loader._missing(weights, {one for each in names.values() for one in each})


@pytest.mark.parametrize("name", list(LLAMA_CPP))
def test_names_are_those_of_the_converter_of_llama_cpp(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    assert LISTS[name].source == MAPPING
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[LLAMA_CPP[name]], 2)
    for pattern in LISTS[name].patterns():
        # The table has one name for the matrices of all experts. Code of the converter renames this bias.
        stacked = pattern.replace("experts.N.", "experts.").replace(
            "e_score_correction_bias", "e_score_correction"
        )
        assert known.get_name(stacked.replace(".N.", ".1."), (".weight", ".bias")) is not None, pattern


def test_a_name_more_or_less_is_noticed(tmp_path: Path) -> None:
    listed = Names("", {"": "model.extra.weight", "model.layers.N.": "self_attn.q_proj.weight"})
    weights, names = placed(listed, spec_of("llama", listed, tmp_path))
    assert not fits(weights, "model.extra.weight")
    assert fits(weights, "model.layers.0.self_attn.q_proj.weight")
    missing = loader._missing(weights, {one for each in names.values() for one in each})
    assert "model.layers.2.mlp.down_proj.weight" in missing


def test_every_architecture_has_a_list() -> None:
    listed = {config_of(name)["architectures"][0] for name in LISTS}
    spelled = {"KimiK25ForConditionalGeneration"}  # another spelling of an architecture with a list
    assert set(FAMILIES) - listed - spelled == set()
    published = {config_of(name)["architectures"][0] for name, one in LISTS.items() if one.source != MAPPING}
    checked = {config_of(name)["architectures"][0] for name in LLAMA_CPP}
    # Only transformers says how checkpoints of these architectures are named.
    assert set(FAMILIES) - published - checked - spelled == {
        "ApertusForCausalLM",
        "DeepseekV32ForCausalLM",
        "FalconMambaForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "InternVLForConditionalGeneration",
        "JambaForCausalLM",
        "Lfm2MoeForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "OlmoHybridForCausalLM",
        "BailingHybridForCausalLM",
        "Llama4ForCausalLM",
        "MinistralForCausalLM",
        "Qwen2MoeForCausalLM",
        "VaultGemmaForCausalLM",
    }


def test_olmo_hybrid_as_published_and_as_saved_by_transformers(tmp_path: Path) -> None:
    """transformers saves the joined convolution in equal parts; published parts are those of q, k and v."""
    checkpoint = make_checkpoint("olmo-hybrid", tmp_path)
    saved = dict(checkpoint.read().named_parameters())
    as_published(tmp_path)
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        shapes = [
            file.get_slice(f"model.layers.0.linear_attn.{one}_conv1d.weight").get_shape() for one in "qkv"
        ]
    assert shapes == [[36, 1, 4], [36, 1, 4], [72, 1, 4]]
    published = dict(checkpoint.read().named_parameters())
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], published[name]) for name in saved)


def test_ling_3_as_published_may_have_low_rank_queries(tmp_path: Path) -> None:
    """transformers has no class for such files: Ling 3 tiny."""
    checkpoint = make_checkpoint("bailing-hybrid", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, rank = load_file(path), 5
    (name,) = [name for name in tensors if name.endswith("2.attention.q_proj.weight")]
    full = tensors.pop(name)
    layer = name.removesuffix("q_proj.weight")
    first, second = torch.randn(rank, full.shape[1]), torch.randn(full.shape[0], rank)
    tensors |= {f"{layer}q_a_proj.weight": first, f"{layer}q_b_proj.weight": second}
    tensors |= {f"{layer}q_a_layernorm.weight": torch.full((rank,), 3.0)}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["BailingMoeV3ForCausalLM"], "q_lora_rank": rank}
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = dict(checkpoint.read().blocks[2].attention.named_parameters())
    assert torch.equal(attention["down.weight"][:rank], first)
    assert torch.equal(attention["q_up.weight"], second)
    assert attention["q_norm.weight"].tolist() == [3.0] * rank
