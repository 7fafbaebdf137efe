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

CASES: dict[str, tuple[str, dict[str, Any]]] = {
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
}

DEFAULT = ("glm4-moe", "phi3-partial-window")
"""Cases of default runs. The others are slow."""
