"""Small configurations with latent attention: DeepSeek V2 and V3."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
#: Sizes that the C++ operations support.
_SIXTEENS = {"kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}

#: name -> (family name in transformers, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3", {**_BASE, **_GROUPS, "num_nextn_predict_layers": 0}),
    "deepseek-v3-sixteens": ("DeepseekV3", {**_BASE, **_SIXTEENS, **_GROUPS, "norm_topk_prob": False}),
    "deepseek-v3-full-queries-yarn": (
        "DeepseekV3",
        {**_BASE, **_ONE_GROUP, "q_lora_rank": None, "rope_parameters": _YARN, "rms_norm_eps": 1e-3},
    ),
    "deepseek-v3-full-queries-bias": (
        "DeepseekV3",
        {**_BASE, **_SIXTEENS, **_ONE_GROUP, "q_lora_rank": None, "attention_bias": True},
    ),
    "deepseek-v3-dense-halves": (
        "DeepseekV3",
        {**_BASE, **_ONE_GROUP, "first_k_dense_replace": 3, "rope_interleave": False, "attention_bias": True},
    ),
    "deepseek-v2-greedy": (
        "DeepseekV2",
        {**_BASE, "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    ),
    "deepseek-v2-groups-yarn": (
        "DeepseekV2",
        {
            **_BASE,
            **_GROUPS,
            **_SIXTEENS,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**_YARN, "mscale": 0.7},
            "attention_bias": True,
            "first_k_dense_replace": 0,
        },
    ),
}
