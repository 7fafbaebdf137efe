"""Published configuration files of supported families resolve to the right sizes; others are refused by name
before weights are read.

Expected sizes come from ``config.json`` alone, by the formulas of the papers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.real_files import real_folders
from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.cache_layout import block_bytes
from weft.config.families import FAMILIES, load_spec
from weft.config.families.declared.rows import WRAPPERS
from weft.config.families.generic import probing as generic
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.sizing.memory import weight_bytes
from weft.config.spec import ModelSpec

Fields = dict[str, Any]
POSITIONS = 1 << 14
"""Positions over which bytes are counted: a multiple of all blocks."""

NAMED = {
    "Mixtral-8x22B": 141,
    "DeepSeek-V3": 671,
    "DeepSeek-R1": 671,
    "DeepSeek-V4-Flash": 284,
    "DeepSeek-V4-Pro": 1600,
    "GLM-5": 744,
    "Kimi-K2": 1000,
    "MiniMax-M2": 230,
    "Llama-4-Scout": 109,
}
"""Parameters in billions, from model cards, for models without the number in their name."""


def config_of(folder: Path) -> Fields:
    found: Fields = json.loads((folder / "config.json").read_text())
    return found


def text_of(config: Fields) -> Fields:
    return {**config, **(config.get("text_config") or {})}


def served(folder: Path) -> bool:
    return config_of(folder)["architectures"][0] in FAMILIES


def spec_of(folder: Path) -> ModelSpec:
    """Return the spec of a served model, of the text model alone if the tower is not served."""
    (architecture,) = config_of(folder)["architectures"]
    return load_spec(str(folder), trust_remote_code=True, language_model_only=architecture in WRAPPERS)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with enough memory for the largest model."""
    monkeypatch.setattr(devices, "gpu_memory", lambda: None)
    monkeypatch.setattr(devices, "available_memory", lambda: 1 << 43)


def grouped(c: Fields) -> tuple[float, float]:
    """Return (attention parameters of all layers, bytes per token of keys and values that are never
    dropped).
    """
    hidden, heads, layers = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
    dim = c.get("head_dim") or hidden // heads
    kv = c["num_key_value_heads"]
    gate = 3 if c.get("attn_output_gate") else 2
    types = c.get("layer_types") or ["full_attention"] * layers
    if "attention_chunk_size" in c:  # Llama 4: layers with a rotation attend in chunks
        types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    full = types.count("full_attention")
    attending = full + types.count("sliding_attention")
    one = hidden * dim * (gate * heads + 2 * kv)
    if "global_head_dim" in c:  # full layers have keys alone, of another size
        wide, few = c["global_head_dim"], c["num_global_key_value_heads"]
        of_full = hidden * wide * (gate * heads + few)
        return (attending - full) * one + full * of_full, full * 2 * few * wide * 2
    linear = 0
    if attending < layers:
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        projections = hidden * (2 * keys + 2 * values + 2 * c["linear_num_value_heads"]) + values * hidden
        linear = projections + c["linear_conv_kernel_dim"] * (2 * keys + values)
    return attending * one + (layers - attending) * linear, full * 2 * kv * dim * 2


def latent(c: Fields) -> tuple[float, float]:
    """Return the same for DeepSeek V3, Kimi K2 and GLM-5. The indexer has one key per token in layers with an
    indexer.
    """
    hidden, heads, layers = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
    rank, low, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
    one = hidden * rank + rank * heads * (nope + rope) + hidden * (low + rope)
    one += low * heads * (nope + value) + heads * value * hidden
    total = layers * one
    entry = layers * (low + rope) * 2
    if "index_head_dim" in c:
        types = c.get("indexer_types") or ["full"] * layers
        own = types[:layers].count("full")
        total += own * (rank * c["index_n_heads"] * c["index_head_dim"])
        total += own * hidden * (c["index_head_dim"] + c["index_n_heads"])
        entry += own * c["index_head_dim"] * 2
    return total, entry


def compressed(c: Fields) -> tuple[float, float]:
    """DeepSeek V4: one entry for 4 or 128 positions, beside a window; entries of 4 have an indexer's key."""
    hidden, heads, dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    rank, groups, low = c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    one = hidden * rank + rank * heads * dim + hidden * dim
    one += heads * dim * low + groups * low * hidden
    total = c["num_hidden_layers"] * one
    entry = 0.0
    for ratio in c["compress_ratios"][: c["num_hidden_layers"]]:
        if ratio == 128:
            total += 2 * hidden * dim
            entry += dim * 2 / 128
        elif ratio == 4:
            key, index = c["index_head_dim"], c["index_n_heads"]
            total += 4 * hidden * (dim + key) + rank * index * key + hidden * index
            entry += (dim + key) * 2 / 4
    return total, entry


_LETTERS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


def pattern_of(c: Fields) -> str:
    """Return the published layers of Nemotron-H as letters."""
    names = c.get("layers_block_type")
    return str(c["hybrid_override_pattern"]) if names is None else "".join(_LETTERS[one] for one in names)


def single_parts(c: Fields) -> tuple[float, float]:
    """Return the same for Nemotron-H: layers of one part each, and feed-forward blocks without gates."""
    hidden, pattern = c["hidden_size"], pattern_of(c)
    dim = c.get("head_dim") or c["attention_head_dim"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    shared = 2 * c["n_groups"] * c["ssm_state_size"]
    mamba = hidden * (3 * inner + shared + c["mamba_num_heads"]) + c["conv_kernel"] * (inner + shared)
    total = pattern.count("*") * hidden * dim * 2 * (heads + kv) + pattern.count("M") * mamba
    total += pattern.count("-") * 2 * hidden * c["intermediate_size"]
    if "E" in pattern:
        latent = c.get("moe_latent_size") or hidden
        routed = c["n_routed_experts"] * (2 * latent * c["moe_intermediate_size"] + hidden)
        routed += 2 * hidden * c["moe_shared_expert_intermediate_size"]
        routed += 2 * hidden * latent if latent != hidden else 0
        total += pattern.count("E") * routed
    return total, pattern.count("*") * 2 * kv * dim * 2


def attention_of(c: Fields) -> Callable[[Fields], tuple[float, float]]:
    if "compress_ratios" in c:
        return compressed
    if "mamba_num_heads" in c:
        return single_parts
    return latent if c.get("kv_lora_rank") else grouped


def experts_of(c: Fields) -> int:
    for name in ("n_routed_experts", "num_experts", "num_local_experts"):
        if c.get(name):
            return int(c[name])
    return 0


def feed_forward(c: Fields) -> float:
    """Parameters of all layers' feed-forward blocks, routers included."""
    if "mamba_num_heads" in c:
        return 0.0  # counted with the attention
    hidden, layers, experts = c["hidden_size"], c["num_hidden_layers"], experts_of(c)
    if not experts:
        return float(layers * 3 * hidden * c["intermediate_size"])
    inner = c.get("moe_intermediate_size") or c["intermediate_size"]
    if c.get("enable_moe_block"):  # beside a dense block in each layer
        return float(layers * (3 * hidden * (c["intermediate_size"] + experts * inner) + experts * hidden))
    if "intermediate_size_mlp" in c:  # a shared expert of the same size in each layer
        return float(layers * (3 * hidden * (experts + 1) * inner + experts * hidden))
    dense = c.get("first_k_dense_replace", 0)
    shared = c.get("n_shared_experts", 0) * inner + c.get("shared_expert_intermediate_size", 0)
    routed = 3 * hidden * (experts * inner + shared) + experts * hidden
    return float(dense * 3 * hidden * c.get("intermediate_size", 0) + (layers - dense) * routed)


def parameters_of(c: Fields) -> float:
    """Return the number of matrix parameters of the text model."""
    tables = (1 if c.get("tie_word_embeddings") else 2) * c["vocab_size"] * c["hidden_size"]
    return float(attention_of(c)(c)[0] + feed_forward(c) + tables)


def counted(spec: ModelSpec) -> float:
    """Parameters by the plan of memory."""
    return weight_bytes(msgspec.structs.replace(spec, quantized=None), "bfloat16") / 2


def token_bytes(spec: ModelSpec) -> float:
    """Return the cache bytes of one more token of a long context, in 16 bits."""
    kept = [cache for cache in spec.caches if cache.kind != "state" and not cache.window]
    return sum(block_bytes(cache, POSITIONS, "bfloat16") for cache in kept) / POSITIONS


def named_billions(folder: Path) -> float | None:
    name = folder.name.partition("--")[2]
    for start, billions in NAMED.items():
        if name.startswith(start):
            return billions
    found = re.search(r"-(\d+(?:\.\d+)?)b(?![a-z])", name, re.IGNORECASE)
    return None if found is None else float(found[1])


def test_the_files_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    folders = real_folders("configs")
    count = sum(map(served, folders))
    with capsys.disabled():
        print(f"\n{len(folders)} published configurations, {count} of families that are served")
    assert count
    assert len(folders) > count


def test_families_that_are_served_have_the_sizes_of_their_files() -> None:
    for folder in filter(served, real_folders("configs")):
        c = text_of(config_of(folder))
        spec = spec_of(folder)
        latents = attention_of(c) in (latent, compressed)
        found = (spec.hidden, spec.vocab_size, spec.heads)
        names = ("hidden_size", "vocab_size", "num_attention_heads")
        assert found == tuple(c[name] for name in names), folder.name
        # A layer of Nemotron-H is a mixer with the feed-forward behind.
        single = attention_of(c) is single_parts
        layers = sum(map(pattern_of(c).count, "M*")) if single else c["num_hidden_layers"]
        assert spec.layers == layers, folder.name
        assert latents or spec.kv_heads == c["num_key_value_heads"], folder.name
        moe = spec.moe
        assert (moe.experts if moe else 0) == experts_of(c), folder.name
        top_k = c.get("top_k_experts") or c.get("num_experts_per_tok")
        assert moe is None or moe.top_k == top_k, folder.name
        text = msgspec.structs.replace(spec, vision=None)
        assert counted(text) == pytest.approx(parameters_of(c), rel=2e-3), folder.name
        assert token_bytes(spec) == pytest.approx(attention_of(c)(c)[1], rel=1e-9), folder.name


def test_parameters_are_those_of_the_published_names() -> None:
    """Names are rounded. Some names count the text model only, where the tower adds a tenth."""
    named = 0
    for folder in filter(served, real_folders("configs")):
        billions = named_billions(folder)
        assert billions is not None, folder.name
        spec = spec_of(folder)
        assert counted(spec) / 1e9 == pytest.approx(billions, rel=0.12), folder.name
        named += 1
    assert named


def test_quantized_weights_are_planned_near_the_bits_that_their_files_name() -> None:
    """FP8 needs 8 to 9 bits per element, four-bit formats 4 to 6, whichever field names the format."""
    for folder in filter(served, real_folders("configs")):
        config = config_of(folder)
        spec = spec_of(folder)
        four = "NVFP4" in folder.name or config.get("expert_dtype") == "fp4" or "Kimi-K2" in folder.name
        four = four or "gpt-oss" in folder.name
        eight = "FP8" in folder.name or config["architectures"][0] == "DeepseekV3ForCausalLM"
        eight = eight or folder.name.endswith("MiniMax-M2.7")
        assert (spec.quantized is not None) == (four or eight), folder.name
        if (
            spec.quantized is None or "Qwen3.6" in folder.name
        ):  # the last has layers of four and of eight bits
            continue
        text = msgspec.structs.replace(spec, vision=None)
        bits = 8 * weight_bytes(text, "bfloat16", packed=True) / counted(text)
        assert (4 < bits < 6) if four else (8 < bits < 9), (folder.name, bits)


def test_families_that_are_served_resolve() -> None:
    for folder in filter(served, real_folders("configs")):
        keywords: Fields = {"load_format": "dummy", "trust_remote_code": True, "max_model_len": 4096}
        keywords["language_model_only"] = config_of(folder)["architectures"][0] in WRAPPERS
        config = resolve(from_keywords({"model": str(folder), **keywords}))
        assert config.spec.architecture == config_of(folder)["architectures"][0]
        with pytest.raises(ConfigError, match=r"the checkpoint has no \*\.safetensors file"):
            resolve(from_keywords({"model": str(folder), "trust_remote_code": True}))


def test_other_families_are_refused_by_name_and_without_a_guess() -> None:
    for folder in real_folders("configs"):
        (architecture,) = config_of(folder)["architectures"]
        if served(folder) or generic.serves(architecture, "auto", FAMILIES):
            continue
        with pytest.raises(ConfigError) as raised:
            load_spec(str(folder), trust_remote_code=True)
        message = raised.value.message
        assert message.startswith(f"no architecture called {architecture!r}."), folder.name
        assert "Did you mean" not in message, folder.name
