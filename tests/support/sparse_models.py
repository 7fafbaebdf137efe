"""Small configurations with sparse attention: DeepSeek V4."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.attention.sparse import sparse_torch

_WINDOW, _CHOSEN, _ALL = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
#: Eight index heads: of few, all products can be negative, and scores of 0 tie in any order in transformers.
_BASE: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 8,
    "index_head_dim": 12,
    "index_topk": 3,
    "sliding_window": 9,
    "hc_mult": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def _case(
    types: list[str], mlp: list[str], ratios: tuple[int, int], **more: Any
) -> tuple[str, dict[str, Any]]:
    rates = {_CHOSEN: ratios[0], _ALL: ratios[1]}
    of_layers = {"num_hidden_layers": len(types), "layer_types": types, "mlp_layer_types": mlp}
    return "DeepseekV4", {**_BASE, **of_layers, "compress_rates": rates, **more}


#: name -> (family name in transformers, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v4-window": _case([_WINDOW] * 2, ["moe", "moe"], (4, 8), tie_word_embeddings=True),
    "deepseek-v4-chosen": _case([_CHOSEN] * 2, ["moe", "moe"], (4, 8), rope_parameters=_YARN),
    "deepseek-v4-all": _case([_ALL] * 2, ["hash_moe", "moe"], (4, 8), hc_mult=2, rms_norm_eps=1e-4),
    "deepseek-v4": _case(
        [_WINDOW, _CHOSEN, _ALL, _CHOSEN], ["hash_moe", "hash_moe", "moe", "moe"], (4, 16), swiglu_limit=0.5
    ),
    "deepseek-v4-odd": _case(
        [_CHOSEN, _ALL, _WINDOW],
        ["moe", "hash_moe", "moe"],
        (3, 5),
        sliding_window=4,
        index_topk=5,
        o_groups=4,
        scoring_func="sigmoid",
        hc_mult=4,
        hc_sinkhorn_iters=3,
    ),
    # The published ratios; for sequences of some hundred positions.
    "deepseek-v4-long": _case(
        [_ALL, _CHOSEN], ["hash_moe", "moe"], (4, 128), sliding_window=32, index_topk=16, index_n_heads=24
    ),
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 7,
}
CASES["deepseek-v32"] = "DeepseekV32", {**_LATENT, "n_group": 4, "topk_group": 2}
CASES["deepseek-v32-yarn"] = (
    "DeepseekV32",
    {
        **_LATENT,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": True,
        "index_topk": 4,
        "rope_parameters": {**_YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
)
CASES["glm-dsa"] = (
    "GlmMoeDsa",
    {**_LATENT, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
)


def watch_cuts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects, from now on, how far each choice of groups was from another: last chosen to first left."""
    margins: list[float] = []
    choose = sparse_torch.top_ids

    def watched(scores: torch.Tensor, count: int) -> torch.Tensor:
        values = scores.sort(dim=-1, descending=True).values
        gaps = (values[:, count - 1] - values[:, count])[values[:, count].isfinite()]
        margins.extend(gaps.tolist())
        return choose(scores, count)

    monkeypatch.setattr(sparse_torch, "top_ids", watched)
    return margins
