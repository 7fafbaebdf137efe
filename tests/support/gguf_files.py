"""Write GGUF files of transformers models, with tensor names of the ``gguf`` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.support.ggml_blocks import FITTED, fitted

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "glm_moe_dsa": gguf.MODEL_ARCH.GLM_DSA,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
NORMAL, CONTROL, USER = 1, 3, 4


def _neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of llama.cpp's rotary embedding."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _stored(config: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Name in the file to numbers, experts stacked."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        values = weight.float().numpy()
        stem, _, end = name.rpartition(".")
        llama = config.model_type in ("llama", "mixtral")
        if stem.endswith("q_proj") and llama:
            values = _neighbours(values, config.num_attention_heads)
        if stem.endswith("k_proj") and llama:
            values = _neighbours(values, config.num_key_value_heads)
        block = name.split(".")[2] if ".layers." in name else ""
        if hasattr(config, "linear_num_key_heads"):
            if "norm." in name and ".linear_attn." not in name:
                values = values + 1
            if ".linear_attn." in name:
                found |= _delta_net(config, block, name.partition(".linear_attn.")[2], values)
                continue
        if config.model_type == "gpt_oss" and ".experts." in name:
            found |= _in_turn(block, name.rpartition(".")[2], values)
        elif name.endswith("kv_b_proj.weight"):
            up = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, rest = np.split(up, [config.qk_nope_head_dim], axis=1)
            found[f"blk.{block}.attn_k_b.weight"] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[f"blk.{block}.attn_v_b.weight"] = np.ascontiguousarray(rest)
        elif name.endswith("e_score_correction_bias"):
            found[f"blk.{block}.exp_probs_b.bias"] = values
        elif name.endswith("self_attn.sinks"):
            found[f"blk.{block}.attn_sinks.weight"] = values
        elif name.endswith("experts.gate_up_proj"):  # layout of transformers in memory
            n = values.shape[1] // 2
            found[f"blk.{block}.ffn_gate_exps.weight"] = np.ascontiguousarray(values[:, :n])
            found[f"blk.{block}.ffn_up_exps.weight"] = np.ascontiguousarray(values[:, n:])
        elif name.endswith("experts.down_proj"):
            found[f"blk.{block}.ffn_down_exps.weight"] = values
        elif name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
            found[f"blk.{block}.ffn_gate_inp.weight"] = values
        else:
            theirs = names.get_name(stem)
            assert theirs is not None, name
            found[f"{theirs}.{end}"] = values
    return found


def _tiled(config: Any, values: np.ndarray, moved: int) -> np.ndarray:
    """Return the last ``moved`` entries of axis 0 with the value heads of all key heads in turn."""
    kept, heads = np.split(values, [len(values) - moved])
    per_key = config.linear_num_value_heads // config.linear_num_key_heads
    grouped = heads.reshape(config.linear_num_key_heads, per_key, -1, *values.shape[1:])
    return np.concatenate([kept, grouped.swapaxes(0, 1).reshape(heads.shape)])


def _delta_net(config: Any, block: str, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of a gated delta net for the published weight ``name``."""
    value = config.linear_num_value_heads * config.linear_value_head_dim
    key = config.linear_num_key_heads * config.linear_key_head_dim
    theirs = {
        "in_proj_qkv.weight": ("attn_qkv.weight", value),
        "in_proj_z.weight": ("attn_gate.weight", value),
        "in_proj_b.weight": ("ssm_beta.weight", config.linear_num_value_heads),
        "in_proj_a.weight": ("ssm_alpha.weight", config.linear_num_value_heads),
        "in_proj_ba.weight": ("ssm_ba.weight", 0),
        "conv1d.weight": ("ssm_conv1d.weight", value),
        "A_log": ("ssm_a", config.linear_num_value_heads),
        "dt_bias": ("ssm_dt.bias", config.linear_num_value_heads),
        "norm.weight": ("ssm_norm.weight", 0),
        "out_proj.weight": ("ssm_out.weight", 0),
    }
    if name == "in_proj_qkvz.weight":
        groups = values.reshape(config.linear_num_key_heads, -1, values.shape[1])
        size = config.linear_key_head_dim
        each = value // config.linear_num_key_heads
        parts = np.split(groups, np.cumsum([size, size, each]), axis=1)
        parts = [part.reshape(-1, values.shape[1]) for part in parts]
        assert len(parts[0]) == key
        return {
            f"blk.{block}.attn_qkv.weight": np.concatenate(parts[:3]),
            f"blk.{block}.attn_gate.weight": np.ascontiguousarray(parts[3]),
        }
    stored, moved = theirs[name]
    if name == "conv1d.weight":
        values = values[:, 0]
    if name == "A_log":
        values = -np.exp(values)
    if config.model_type != "qwen3_next":
        values = _tiled(config, values, moved) if moved else values
        if name == "out_proj.weight":
            values = np.ascontiguousarray(_tiled(config, np.ascontiguousarray(values.T), value).T)
    return {f"blk.{block}.{stored}": np.ascontiguousarray(values)}


def _hybrid_facts(config: Any) -> dict[str, Any]:
    """Return the keys of gated delta nets, and of shared experts beside."""
    rope = config.rope_parameters
    facts: dict[str, Any] = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 2,
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
    }
    if "mrope_section" in rope:
        facts["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if (size := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        facts["expert_shared_feed_forward_length"] = size
    return facts


def _in_turn(block: str, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """GPT-OSS's experts: published with inputs first, rows of gate and up in turn."""
    end = "bias" if name.endswith("_bias") else "weight"
    rows = values if end == "bias" else values.swapaxes(1, 2)
    if name.startswith("down_proj"):
        return {f"blk.{block}.ffn_down_exps.{end}": np.ascontiguousarray(rows)}
    return {
        f"blk.{block}.ffn_{what}_exps.{end}": np.ascontiguousarray(rows[:, first::2])
        for first, what in enumerate(("gate", "up"))
    }


def _latent_facts(config: Any) -> dict[str, Any]:
    """Return the keys of latent attention and of DeepSeek's routing."""
    sigmoid = config.model_type in ("deepseek_v3", "glm_moe_dsa")
    facts = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_group_count": config.n_group or 1,
        "expert_group_used_count": config.topk_group or 1,
        "vocab_size": config.vocab_size,
    }
    if config.q_lora_rank is not None:
        facts["attention.q_lora_rank"] = config.q_lora_rank
    if config.model_type == "glm_moe_dsa":
        facts["attention.indexer.head_count"] = config.index_n_heads
        facts["attention.indexer.key_length"] = config.index_head_dim
        facts["attention.indexer.top_k"] = config.index_topk
        facts["attention.indexer.types"] = [int(kind == "full") for kind in config.indexer_types]
    return facts


def write_model(
    path: Path,
    model: Any,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    texts: Mapping[str, Any] | None = None,
    pack: Callable[[str, np.ndarray], np.ndarray] | None = None,
    **more: Any,
) -> None:
    """Write ``model`` with matrices in the GGML type ``kind``. ``pack``: packs numbers in a type, by default
    the package or ``fitted``.

    ``kinds`` maps a part of a tensor's name to another type. ``texts`` are tokenizer keys without their
    prefix; ``more`` are further keys of the model.
    """
    config = model.config
    architecture = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(str(path), architecture)
    rope = config.rope_parameters or {}
    facts: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    latent = getattr(config, "kv_lora_rank", None) is not None
    if hasattr(config, "linear_num_key_heads"):
        facts |= _hybrid_facts(config)
    if latent:
        facts |= _latent_facts(config)
    elif (size := getattr(config, "head_dim", None)) is not None:
        facts |= {"attention.key_length": size, "attention.value_length": size}
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts and not latent:
        facts |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if (size := getattr(config, "moe_intermediate_size", None)) is not None:
        facts["expert_feed_forward_length"] = size
    if config.model_type == "gpt_oss":
        facts["expert_feed_forward_length"] = config.intermediate_size
        facts["attention.sliding_window"] = config.sliding_window
    _add(writer, {f"{architecture}.{key}": value for key, value in (facts | more).items()})
    _add(writer, {f"tokenizer.ggml.{key}": value for key, value in (texts or some_texts()).items()})
    weights = dict(model.state_dict())
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for name, values in _stored(config, weights).items():
        plain = values.ndim < 2 or name.endswith(".bias") or "gate_inp" in name or "conv1d" in name
        own = next((other for part, other in (kinds or {}).items() if part in name), kind)
        add_tensor(writer, name, values, "F32" if plain else own, pack)
    _finish(writer)


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: np.ndarray,
    kind: str,
    pack: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> None:
    """Adds ``values`` in the GGML type ``kind``; ``pack``: see ``write_model``."""
    made = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        writer.add_tensor(name, values.astype(np.float32 if kind == "F32" else np.float16))
    elif pack is not None:
        writer.add_tensor(name, pack(kind, values), raw_dtype=made)
    elif kind in FITTED:
        writer.add_tensor(name, fitted(kind, values), raw_dtype=made)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, made), raw_dtype=made)


def some_texts() -> dict[str, Any]:
    """Return a minimal vocabulary for tests that never tokenize."""
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "</s>", "ab"],
        "merges": ["a b"],
        "eos_token_id": 2,
    }


def texts_of(folder: Path, pre: str) -> dict[str, Any]:
    """Return the keys of the byte-level tokenizer in ``folder``."""
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = dict(data["model"]["vocab"])
    special = {}
    for token in data["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        special[token["id"]] = CONTROL if token["special"] else USER
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [special.get(i, NORMAL) for i in range(len(tokens))],
        "merges": merges,
    }


def _add(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value:
            writer.add_array(key, value)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
