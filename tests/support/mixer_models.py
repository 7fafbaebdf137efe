"""Tiny configurations of the families with short convolutions or Mamba, for parity tests: see
tests/models/conftest.py.
"""

from __future__ import annotations

from typing import Any

CONV, FULL = "conv", "full_attention"

_LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "block_multiple_of": 8,
    "layer_types": [CONV, CONV, FULL, CONV],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
_LFM2_MOE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "layer_types": [CONV, FULL, CONV, CONV],
}
MAMBA, ATTENTION, DENSE, ROUTED = "linear_attention", "full_attention", "mlp", "moe"
_NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 10,
    "n_groups": 2,
    # transformers clamps the time step of prompts, not of decode steps: keep the clamp out of reach
    "time_step_min": 1e-20,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
_BAMBA: dict[str, Any] = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}
_GRANITE: dict[str, Any] = {
    "layer_types": [MAMBA, ATTENTION, MAMBA],
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "shared_intermediate_size": 56,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.6,
}
_FALCON: dict[str, Any] = {
    "mamba_d_ssm": 40,
    "mamba_n_heads": 4,
    "mamba_d_state": 10,
    "mamba_n_groups": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8],
    "mlp_multipliers": [1.4, 0.6],
}

_MAMBA2: dict[str, Any] = {
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), None),
    "max_position_embeddings": None,
    "num_heads": 8,
    "head_dim": 12,
    "n_groups": 2,
    "state_size": 10,
}

_MAMBA1: dict[str, Any] = {
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), None),
    "max_position_embeddings": None,
    "state_size": 10,
}
_JAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "mamba_d_state": 10,
    "mamba_dt_rank": 5,
}

#: name -> (family name in transformers, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", _LFM2),
    "lfm2-bias-taps": (
        "Lfm2",
        {
            **_LFM2,
            "conv_bias": True,
            "conv_L_cache": 5,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
            "layer_types": None,
            "full_attn_idxs": [0, 3],
        },
    ),
    "lfm2-moe": ("Lfm2Moe", _LFM2_MOE),
    "lfm2-moe-plain-scores": (
        "Lfm2Moe",
        {
            **_LFM2_MOE,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "conv_L_cache": 2,
        },
    ),
    "nemotron-h-moe": (
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": [MAMBA, ROUTED, MAMBA, ATTENTION, ROUTED, MAMBA, ROUTED, MAMBA]},
    ),
    "nemotron-h-dense": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": [MAMBA, DENSE, ATTENTION, MAMBA, DENSE],
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 1,
        },
    ),
    "nemotron-h-latent": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": [MAMBA, ROUTED, ATTENTION, ROUTED],
            "moe_latent_size": 20,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "bamba": ("Bamba", _BAMBA),
    "bamba-groups-bias": (
        "Bamba",
        {
            **_BAMBA,
            "mamba_n_groups": 4,
            "mamba_d_conv": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.2, 0.9],
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": ("Mamba2", _MAMBA2),
    "mamba2-bias": (
        "Mamba2",
        {
            **_MAMBA2,
            "head_dim": 18,
            "expand": 3,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "mamba": ("Mamba", _MAMBA1),
    "mamba-odd": (
        "Mamba",
        {
            **_MAMBA1,
            "intermediate_size": 108,
            "state_size": 7,
            "time_step_rank": 5,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "falcon-mamba": ("FalconMamba", {**_MAMBA1, "mixer_rms_eps": 1e-3}),
    "jamba": ("Jamba", {**_JAMBA, "num_experts": 6, "num_experts_per_tok": 3}),
    "jamba-dense": (
        "Jamba",
        {
            **_JAMBA,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_expand": 3,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {**_GRANITE, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {**_GRANITE, "num_local_experts": 0, "mamba_n_groups": 2, "tie_word_embeddings": True},
    ),
    "granite-hybrid-rope": (
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            "num_local_experts": 0,
            "layer_types": [ATTENTION] * 3,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "attention_bias": True,
        },
    ),
    "falcon-h1": ("FalconH1", _FALCON),
    "falcon-h1-norm": (
        "FalconH1",
        {
            **_FALCON,
            "mamba_rms_norm": True,
            "mamba_n_groups": 1,
            "mlp_multipliers": None,
            "ssm_multipliers": None,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-gated-norm": (
        "FalconH1",
        {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None},
    ),
}

DEFAULT = (
    *("lfm2-moe", "mamba2", "nemotron-h-moe", "granite-hybrid", "falcon-h1"),
    *("falcon-mamba", "jamba"),
)
"""Cases that run by default."""
