"""Kimi Linear: configurations as published and as transformers saves them, and settings that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.sizing.memory import weight_bytes
from weft.config.spec import ModelSpec
from weft.layers.rope import inverse_frequencies

PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def spec_of(folder: Path, config: dict[str, Any], override: int | None = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(str(folder), override)


def test_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, PUBLISHED)
    assert spec.delta is not None
    assert spec.mla is not None
    assert spec.moe is not None
    full = (3, 7, 11, 15, 19, 23, 26)
    assert [(cache.form, cache.layers) for cache in spec.caches] == [
        ("latent", full),
        ("delta", tuple(i for i in range(27) if i not in full)),
    ]
    delta, moe = spec.delta, spec.moe
    assert (delta.k_heads, delta.k_dim, delta.gate_rank, delta.decays) == (32, 128, 128, 4096)
    assert (spec.mla.q_lora, spec.mla.rope, spec.mla.scale) == (None, 64, 192**-0.5)
    assert not inverse_frequencies(spec.rope).any(), "no pair rotates"
    assert (moe.experts, moe.top_k, moe.scale) == (256, 8, 2.446)
    assert (moe.scoring, moe.correction) == ("sigmoid", True)
    assert (moe.layers, moe.shared) == (tuple(range(1, 27)), 1024)
    assert (spec.max_position, spec.norm_eps, spec.eos_ids) == (1 << 20, 1e-5, (163586,))
    assert weight_bytes(spec, "bfloat16") / 2e9 == pytest.approx(49, abs=0.3), "48B, and the tables of tokens"
    assert spec_of(tmp_path, PUBLISHED, override=5).caches[1].layers == (0, 1, 2, 4)


def test_the_form_of_transformers_is_the_same_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    given = {name: value for name, value in PUBLISHED.items() if name != "architectures"}
    saved = transformers.KimiLinearConfig(**given).to_dict()
    saved.pop("linear_attn_config")
    assert "layer_types" in saved
    spec = spec_of(tmp_path, {**saved, "architectures": PUBLISHED["architectures"]})
    assert spec == spec_of(tmp_path, PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"hidden_act": "situ"}, "hidden_act"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"routed_expert_hidden_size": 3584}, "routed_expert_hidden_size"),
        ({"attn_res_block_size": 12}, "attn_res_block_size"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"use_grouped_topk": False}, "use_grouped_topk"),
        ({"layer_types": ["linear_attention"] * 26}, "layer_types has 26 entries"),
        ({"mlp_layer_types": ["moe"] * 27}, "mlp_layer_types"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "linear_attn_config.gate_lower_bound"),
        ({"linear_attn_config": {"full_attn_layers": [0, 4]}}, "full_attn_layers"),
    ],
)
def test_settings_with_other_results_are_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Several of the settings are those of Kimi K3, which has the same ``model_type``."""
    config = {**PUBLISHED, **changes}
    if "linear_attn_config" in changes:
        config["linear_attn_config"] = {**PUBLISHED["linear_attn_config"], **changes["linear_attn_config"]}
    with pytest.raises(ConfigError, match=named):
        spec_of(tmp_path, config)
