"""Tiny configurations of the families with delta nets, for parity tests: see tests/models/conftest.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FULL, LINEAR = "full_attention", "linear_attention"

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}

_KIMI: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "pad_token_id": None,
}

_OLMO: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    "rope_parameters": {"rope_theta": None},
    "pad_token_id": None,
}

_BAILING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "pad_token_id": None,
}

#: name -> (family name in transformers, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {**_SHAPE, **_MOE, "mlp_only_layers": [1]}),
    "qwen3-next-sparse-step": (
        "Qwen3Next",
        {**_SHAPE, **_MOE, "decoder_sparse_step": 2, "norm_topk_prob": False, "linear_key_head_dim": 32},
    ),
    "qwen3-5-moe": ("Qwen3_5Moe", {**_SHAPE, **_MOE, "intermediate_size": None, "rope_parameters": _MROPE}),
    "qwen3-next-dense": ("Qwen3Next", {**_SHAPE, **_MOE, "mlp_only_layers": [0, 1, 2, 3]}),
    # Heads that the C++ operations do not support, a short convolution, equal numbers of key and value heads.
    "qwen3-next-odd-heads": (
        "Qwen3Next",
        {
            **_SHAPE,
            **_MOE,
            "num_experts": 0,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "layer_types": [FULL, LINEAR, LINEAR, FULL],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-5": ("Qwen3_5", {**_SHAPE, "linear_value_head_dim": 32, "rope_parameters": _MROPE}),
    "qwen3-5-tied": (
        "Qwen3_5",
        {
            **_SHAPE,
            "layer_types": [LINEAR, FULL, LINEAR],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    # No rotation, sizes of heads by the hidden size: keys of 9, values of 18.
    "olmo-hybrid": ("OlmoHybrid", _OLMO),
    "olmo-hybrid-rope": (
        "OlmoHybrid",
        {
            **_OLMO,
            "num_key_value_heads": 2,
            "layer_types": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "bailing-hybrid": ("BailingHybrid", _BAILING),
    # Decays without a bound, sizes that the C++ operations do not support, biases, three taps.
    "bailing-hybrid-odd-heads": (
        "BailingHybrid",
        {
            **_BAILING,
            "num_hidden_layers": 3,
            "layer_types": None,
            "layer_group_size": 2,
            "kda_safe_gate": False,
            "head_dim": 12,
            "short_conv_kernel_size": 3,
            "attention_bias": True,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "kimi-linear": ("KimiLinear", _KIMI),
    # Sizes that the C++ operations do not support, low-rank queries, biases, groups of experts.
    "kimi-linear-odd-heads": (
        "KimiLinear",
        {
            **_KIMI,
            "num_hidden_layers": 3,
            "layer_types": [FULL, LINEAR, FULL],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "linear_num_heads": 3,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": 20,
            "attention_bias": True,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "kimi-linear-dense": (
        "KimiLinear",
        {**_KIMI, "mlp_layer_types": ["dense"] * 4, "layer_types": [LINEAR] * 4, "rms_norm_eps": 1e-3},
    ),
}


def as_published(folder: Path) -> None:
    """Change the names and parts of an OLMo Hybrid in ``folder`` from transformers to published files.

    The convolutions of q, k and v are of their own rows, and layers with attention have norms of their names.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [one for one in tensors if one.endswith(".linear_attn.q_conv1d.weight")]:
        layer = name.removesuffix("q_conv1d.weight")
        parts = [f"{layer}{part}_conv1d.weight" for part in "qkv"]
        rows = [len(tensors[f"{layer}{part}_proj.weight"]) for part in "qkv"]
        joined = torch.cat([tensors[part] for part in parts])
        tensors |= {part: one.clone() for part, one in zip(parts, joined.split(rows), strict=True)}
    for name in [one for one in tensors if one.endswith(".self_attn.q_proj.weight")]:
        layer = name.removesuffix("self_attn.q_proj.weight")
        norm = tensors.pop(f"{layer}feedforward_layer_norm.weight")
        tensors[f"{layer}post_attention_layernorm.weight"] = norm
    save_file(tensors, path, {"format": "pt"})
