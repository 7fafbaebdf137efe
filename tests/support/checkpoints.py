"""Small random checkpoints, made with transformers, one for each shape of cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 67

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _qwen3_moe() -> tuple[str, dict[str, Any]]:
    return "Qwen3Moe", {
        **_COMMON,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }


def _qwen2_windowed() -> tuple[str, dict[str, Any]]:
    return "Qwen2", {
        **_COMMON,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "use_sliding_window": True,
        "sliding_window": 19,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }


def _llama() -> tuple[str, dict[str, Any]]:
    return "Llama", {**_COMMON, "num_hidden_layers": 2, "intermediate_size": 64}


def _mistral() -> tuple[str, dict[str, Any]]:
    return "Mistral", {**_COMMON, "num_hidden_layers": 2, "intermediate_size": 64, "sliding_window": 21}


def _qwen3_next() -> tuple[str, dict[str, Any]]:
    return "Qwen3Next", {
        **_COMMON,
        "initializer_range": 0.18,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }


SHAPES = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_windowed": _qwen2_windowed,
    "qwen3_next": _qwen3_next,
}


def make_checkpoint(folder: Path, shape: str, seed: int = 0) -> Path:
    """Saves a random checkpoint of ``shape`` (a key of ``SHAPES``) and returns its folder."""
    import transformers

    family, settings = SHAPES[shape]()
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**settings)
    config.use_cache = True
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float64)
    target = folder / shape
    model.save_pretrained(target)
    return target
