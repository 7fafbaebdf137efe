"""Random configurations of declared architectures: name -> (family name in transformers, configuration)."""

from __future__ import annotations

from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
_EXPERTS = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
LLAMA4 = {
    "head_dim": 16,
    "num_local_experts": 4,
    "intermediate_size": 24,
    "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "num_hidden_layers": 4,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-window": ("Mistral", {"sliding_window": 9, "rms_norm_eps": 1e-4}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "glm4-moe": (
        "Glm4Moe",
        {
            **_EXPERTS,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "glm4-moe-plain": ("Glm4Moe", {**_EXPERTS, "n_shared_experts": 2, "norm_topk_prob": False}),
    "solar-open": ("SolarOpen", {**_EXPERTS, "intermediate_size": None}),
    "dots1": (
        "Dots1",
        {**_EXPERTS, "first_k_dense_replace": 1, "sliding_window": 7, "max_window_layers": 1},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 20, "attention_out_bias": True}),
    "phi3": ("Phi3", {"pad_token_id": 0, "eos_token_id": 2}),
    "phi3-partial-window": (
        "Phi3",
        {
            "pad_token_id": 0,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi3-long": (
        "Phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.67,
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.0, 1.7, 3.0, 9.0],
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.7,
            "mlp_bias": True,
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {"num_local_experts": 5, "residual_multiplier": 0.6, "logits_scaling": 0.5, "intermediate_size": 24},
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 36,
            "embedding_multiplier": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {"eos_token_id": 2}),
    "olmo3": (
        "Olmo3",
        {
            "eos_token_id": 2,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.1,
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 7, "num_hidden_layers": 4}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "head_dim": 16, "layer_types": [_FULL] * 3}),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4},
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 2, "head_dim": 12}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 5.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_local_base_freq": 5000.0,
            "rope_theta": 40000.0,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "head_dim": 12,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 7,
            "tie_word_embeddings": False,
            "layer_types": [_SLIDING, _FULL, _FULL],
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-inputs": (
        "Gemma4Text",
        {
            "head_dim": 12,
            "global_head_dim": 20,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 131,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "sliding_window": 7,
            "tie_word_embeddings": False,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _FULL],
        },
    ),
    "gemma4-moe": (
        "Gemma4Text",
        {
            "head_dim": 12,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 7,
            "tie_word_embeddings": False,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "layer_types": [_SLIDING, _FULL, _FULL],
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "attn_logit_softcapping": 0.7,
            "final_logit_softcapping": 5.0,
        },
    ),
    "vaultgemma": ("VaultGemma", {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 0.5}),
    "gemma": ("Gemma", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 36,
            "decoder_sparse_step": 2,
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "eos_token_id": 2},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
        },
    ),
    "glm": ("Glm", {"head_dim": 20, "pad_token_id": 0, "eos_token_id": 2}),
    "cwm": ("Cwm", {"head_dim": 16, "sliding_window": 6, "eos_token_id": 2, "bos_token_id": 1}),
    "ministral": (
        "Ministral",
        {"head_dim": 12, "sliding_window": 6, "layer_types": [_SLIDING, _FULL, _SLIDING]},
    ),
    "llama4": ("Llama4Text", {**LLAMA4, "floor_scale": 16, "attention_chunk_size": 128}),
    "llama4-chunks": ("Llama4Text", {**LLAMA4, "floor_scale": 4, "attention_chunk_size": 5}),
    "llama4-plain": (
        "Llama4Text",
        {
            "num_local_experts": 3,
            "intermediate_size": 24,
            "intermediate_size_mlp": 24,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "head_dim": 12,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {
            "pad_token_id": 0,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": [_FULL, _SLIDING, _FULL],
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "ernie": ("Ernie4_5", {"head_dim": 20, "use_bias": True}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": False,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 2}),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "kv_lora_rank": 16,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "num_key_value_heads": 4,
        },
    ),
    "cohere2": (
        "Cohere2",
        {"sliding_window": 6, "num_hidden_layers": 4, "logit_scale": 0.3, "eos_token_id": 2},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.3, "eos_token_id": 2}),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "arcee": ("Arcee", {"mlp_bias": True, "eos_token_id": 2, "bos_token_id": 1}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8, "eos_token_id": 2, "bos_token_id": 1}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "apertus": ("Apertus", {}),
}

DEFAULT = (
    "mistral-window",
    "glm4-moe",
    "phi3-partial-window",
    "granite",
    "olmo3",
    "hunyuan",
    "gemma3",
    "ernie",
    "cohere2",
    "phi",
)
"""Cases of default runs. The others are slow."""
