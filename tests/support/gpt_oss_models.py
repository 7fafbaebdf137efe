"""Random configurations of GPT-OSS for the parity tests."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
_GPT: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 7}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

#: name -> (family name in transformers, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOss", {**_GPT, "rope_parameters": _YARN}),
    "gpt-oss-clamped": (
        "GptOss",
        {
            **_GPT,
            "num_experts_per_tok": 1,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.2,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt-oss-full-tied": (
        "GptOss",
        {
            **_GPT,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_types": [FULL, SLIDING, FULL],
            "num_key_value_heads": 1,
            "intermediate_size": 36,
            "rope_parameters": _YARN,
        },
    ),
}
