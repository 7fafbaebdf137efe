"""A tiny model of every family, as a ``config.json``. Random weights are sufficient for the proofs.

All sizes are divisible by 4, so each model can run on up to four ranks. Field names are those of published
checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
CHOSEN, COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"

_COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10_000.0,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
_KIMI: dict[str, Any] = {
    **{name: value for name, value in _LATENT.items() if not name.startswith(("n_", "norm_", "scoring"))},
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "num_heads": 8,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "q_lora_rank": None,
    "num_experts": 8,
    "num_shared_experts": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
}
_INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 24}

#: Family name -> (architecture, model_type, fields besides the common part).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": 37}),
    "mixtral": ("MixtralForCausalLM", "mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe", {**_EXPERTS, "decoder_sparse_step": 1}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "qwen3_5_text", _DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3", {**_LATENT, "num_nextn_predict_layers": 1}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "deepseek_v32", {**_LATENT, **_INDEX}),
    "glm_dsa": (
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {**_LATENT, **_INDEX, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        {
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, CHOSEN, COMPRESSED],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "compress_rates": {CHOSEN: 4, COMPRESSED: 16},
            "sliding_window": 24,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 24,
            "o_groups": 4,
            "o_lora_rank": 12,
            **_INDEX,
            "index_n_heads": 8,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": 1.5,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "layer_types": [SLIDING, FULL],
            "attention_bias": True,
            "swiglu_limit": 7.0,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 4,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 8,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 24,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "gemma2",
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 24, "attn_logit_softcapping": 2.0},
    ),
    "kimi_linear": ("KimiLinearForCausalLM", "kimi_linear", _KIMI),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["conv", FULL, "conv", "conv"],
            "num_dense_layers": 1,
            "norm_eps": 1e-5,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        "bailing_hybrid",
        {
            "num_key_value_heads": 8,
            "num_hidden_layers": 4,
            "layer_group_size": 3,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "mamba2",
        {"num_heads": 8, "n_groups": 4, "state_size": 16, "rope_theta": None},
    ),
    "falcon_mamba": (
        "FalconMambaForCausalLM",
        "falcon_mamba",
        {"intermediate_size": 128, "state_size": 8, "rope_theta": None},
    ),
    "jamba": (
        "JambaForCausalLM",
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mamba_d_state": 8,
            "rope_theta": None,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        {
            **{name: value for name, value in _DELTA.items() if not name.startswith("partial")},
            "num_key_value_heads": 8,
            "rope_theta": None,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "hybrid_override_pattern": "MEM*EM-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            "layer_types": ["mamba", FULL],
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "residual_multiplier": 0.5,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "falcon_h1",
        {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 16, "ssm_out_multiplier": 0.5},
    ),
}


def write_family(folder: Path, family: str) -> Path:
    """Write the ``config.json`` of ``family`` (a key of ``FAMILIES``) to a folder below ``folder``.

    Return the new folder, to be served with ``--load-format dummy``.
    """
    architecture, kind, more = FAMILIES[family]
    target = folder / family
    target.mkdir(parents=True, exist_ok=True)
    config = {**_COMMON, **more, "architectures": [architecture], "model_type": kind}
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return target
