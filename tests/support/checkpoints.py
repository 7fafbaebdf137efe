"""Make small random checkpoints with transformers, one per form of cache."""

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
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    }


def _qwen3_next_wide() -> tuple[str, dict[str, Any]]:
    """Return a Qwen3-Next whose heads divide over four ranks."""
    family, settings = _qwen3_next()
    return family, {**settings, "linear_num_key_heads": 4, "linear_num_value_heads": 8}


def _kimi_linear() -> tuple[str, dict[str, Any]]:
    return "KimiLinear", {
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        "initializer_range": 0.33,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }


def _lfm2() -> tuple[str, dict[str, Any]]:
    return "Lfm2Moe", {
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }


def _nemotron_h() -> tuple[str, dict[str, Any]]:
    mamba, attention = "linear_attention", "full_attention"
    return "NemotronH", {
        **_COMMON,
        "layers_block_type": [mamba, "moe", mamba, attention, "mlp", mamba],
        "intermediate_size": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        # transformers clamps the time step of prompts, not of decode steps: keep the clamp out of reach
        "time_step_min": 1e-20,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "rescale_prenorm_residual": False,
    }


def _falcon_h1() -> tuple[str, dict[str, Any]]:
    return "FalconH1", {
        **_COMMON,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "key_multiplier": 0.5,
    }


def _mamba2() -> tuple[str, dict[str, Any]]:
    sizes = {name: value for name, value in _COMMON.items() if not name.startswith(("num_", "max_"))}
    return "Mamba2", {
        **sizes,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 12,
        "n_groups": 2,
        "state_size": 8,
    }


def _falcon_mamba() -> tuple[str, dict[str, Any]]:
    sizes = {name: value for name, value in _COMMON.items() if not name.startswith(("num_", "max_", "head_"))}
    return "FalconMamba", {**sizes, "num_hidden_layers": 3, "state_size": 6, "time_step_rank": 8}


def _jamba() -> tuple[str, dict[str, Any]]:
    return "Jamba", {
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mamba_d_state": 6,
        "mamba_dt_rank": 8,
    }


def _bailing_hybrid() -> tuple[str, dict[str, Any]]:
    kimi = _kimi_linear()[1]
    return "BailingHybrid", {
        **{name: value for name, value in kimi.items() if not name.startswith("linear_")},
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    }


def _olmo_hybrid() -> tuple[str, dict[str, Any]]:
    return "OlmoHybrid", {
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 8,
        "rope_parameters": {"rope_theta": None},
    }


def _deepseek_v3() -> tuple[str, dict[str, Any]]:
    return "DeepseekV3", {
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        "initializer_range": 0.33,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    }


def _deepseek_v32() -> tuple[str, dict[str, Any]]:
    latent = _deepseek_v3()[1]
    return "DeepseekV32", {**latent, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 7}


def _glm_dsa() -> tuple[str, dict[str, Any]]:
    """Every second layer uses the choice of the layer before."""
    types = ["full", "shared", "full"]
    return "GlmMoeDsa", {**_deepseek_v32()[1], "num_hidden_layers": len(types), "indexer_types": types}


def _deepseek_v4() -> tuple[str, dict[str, Any]]:
    layers = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    return "DeepseekV4", {
        **_COMMON,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "layer_types": layers,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {layers[1]: 4, layers[2]: 16},
        "sliding_window": 11,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "o_groups": 4,
        "o_lora_rank": 12,
        "index_n_heads": 16,
        "index_head_dim": 12,
        "index_topk": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }


def spread(model: Any) -> None:
    """Fill the biases, sinks and expert tables that transformers initializes to zero, so that tests cover the
    code.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            experts = model.config.n_routed_experts
            tensor.data.copy_(torch.rand(len(tensor), experts).argsort(dim=1)[:, : tensor.shape[1]])
        elif tensor.is_floating_point() and tensor.numel() and not tensor.any():
            tensor.data.normal_(0.0, 0.3)


SHAPES = {
    "bailing_hybrid": _bailing_hybrid,
    "deepseek_v32": _deepseek_v32,
    "deepseek_v4": _deepseek_v4,
    "llama": _llama,
    "mistral": _mistral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_windowed": _qwen2_windowed,
    "qwen3_next": _qwen3_next,
    "qwen3_next_wide": _qwen3_next_wide,
    "deepseek_v3": _deepseek_v3,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _falcon_mamba,
    "glm_dsa": _glm_dsa,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
}


def make_checkpoint(folder: Path, shape: str, seed: int = 0) -> Path:
    """Save a random checkpoint of ``shape`` (a key of ``SHAPES``). Return its folder."""
    import transformers

    family, settings = SHAPES[shape]()
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**settings)
    config.use_cache = True
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float64)
    if shape in ("deepseek_v32", "deepseek_v4", "glm_dsa"):
        spread(model)
    target = folder / shape
    model.save_pretrained(target)
    return target
