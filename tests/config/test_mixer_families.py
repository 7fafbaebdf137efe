"""Configuration files of families with state mixers: published fields, and settings that are
refused by name.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from weft.common.errors import ConfigError
from weft.config import sharding
from weft.config.families import load_spec
from weft.config.spec import ModelSpec
from weft.models.registry import WEIGHTS
from weft.types.layout import Layout

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
#: Fields of the publisher's own configurations.
LFM2: dict[str, Any] = {
    **_SIZES,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "block_auto_adjust_ff_dim": True,
    "block_dim": 64,
    "block_ff_dim": 150,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 16,
    "block_norm_eps": 1e-5,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 64,
    "full_attn_idxs": [2],
    "norm_eps": 1e-5,
    "num_heads": 4,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "tie_embedding": True,
}
NEMOTRON: dict[str, Any] = {
    **_SIZES,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 9,
    "hybrid_override_pattern": "MEM*EM-ME",
    "head_dim": 16,
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "partial_rotary_factor": 1.0,
    "time_step_limit": [0.0, 1e308],
}
#: As published for Codestral Mamba, except the sizes.
MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 4,
    "state_size": 12,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-4,
    "norm_before_gate": True,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "time_step_floor": 1e-3,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.2,
    "time_step_min": 0.01,
    "time_step_rank": 256,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
}
OLMO: dict[str, Any] = {
    **_SIZES,
    "architectures": ["OlmoHybridForCausalLM"],
    "model_type": "olmo_hybrid",
    "num_hidden_layers": 8,
    "num_key_value_heads": None,
    "intermediate_size": 96,
    "linear_a_log_max": 8.0,
    "linear_dt_min": 0.002,
    "linear_use_gate": True,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
}
#: As published for Ling 3 tiny and its tuned versions, except the sizes.
LING: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "eos_token_id": 95,
    "expert_swiglu_limit_list": None,
    "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kda_lower_bound": -5,
    "kda_safe_gate": True,
    "kv_lora_rank": 24,
    "layer_group_size": 4,
    "linear_silu": True,
    "max_position_embeddings": 4096,
    "max_window_layers": 20,
    "moe_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "mtp_loss_scaling_factor": 0,
    "mtp_use_kda": False,
    "n_group": 4,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_kv_heads_for_linear_attn": 0,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "output_router_logits": False,
    "pad_token_id": 92,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 20,
    "qk_head_dim": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"},
    "rope_theta": 6000000,
    "rotary_dim": 8,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "scale_router_input": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "share_expert_swiglu_limit_list": [0, 0.0],
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "v_head_dim": 10,
    "value_norm": False,
    "vocab_size": 128,
}
_MAMBA: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
}
BAMBA = {**_MAMBA, "architectures": ["BambaForCausalLM"], "attn_layer_indices": [1], "attn_rotary_emb": 8}
#: Published Granite 4 files say mamba, attention and nope.
GRANITE = {
    **_MAMBA,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 48,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "normalization_function": "rmsnorm",
    "logits_scaling": 6,
}
FALCON = {**_MAMBA, "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 64}


#: As published for Mamba 130M in the form of transformers, except the sizes.
MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "conv_kernel": 4,
    "d_inner": 128,
    "d_model": 64,
    "expand": 2,
    "fused_add_norm": True,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.1,
    "intermediate_size": 128,
    "layer_norm_epsilon": 1e-5,
    "n_layer": 3,
    "num_hidden_layers": 3,
    "pad_vocab_size_multiple": 8,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "ssm_cfg": {},
    "state_size": 12,
    "time_step_floor": 1e-4,
    "time_step_init_scheme": "random",
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 5,
    "time_step_scale": 1.0,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 128,
}
#: As published for Falcon Mamba 7B, except the sizes. The stated width is not "expand" times the hidden size.
FALCON_MAMBA = {
    **MAMBA,
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "expand": 16,
    "intermediate_size": 144,
    "mixer_rms_eps": 1e-4,
    "tie_word_embeddings": False,
    "use_mambapy": False,
}
#: As published for Jamba 1.5, except the sizes.
JAMBA: dict[str, Any] = {
    **_SIZES,
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "attention_dropout": 0.0,
    "attn_layer_offset": 2,
    "attn_layer_period": 4,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "intermediate_size": 96,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 12,
    "mamba_dt_rank": 5,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "n_ctx": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_logits_to_keep": 1,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mamba_kernels": True,
}


def spec_of(folder: Path, config: dict[str, Any], override: int | None = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(str(folder), override)


def test_lfm2_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LFM2)
    assert spec.conv is not None
    assert (spec.conv.layers, spec.caches[0].layers) == ((0, 1, 3), (2,))
    assert (spec.intermediate, spec.tied, spec.rope.theta) == (112, True, 1e6)
    assert [cache.form for cache in spec.caches] == ["gqa", "conv"]
    assert spec.caches[1].parts[0].shape == (4, 2, 16)


def test_mamba2_has_states_alone(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MAMBA2)
    assert spec.mamba is not None
    assert (spec.mamba.heads, spec.mamba.dim, spec.mamba.norm_groups) == (8, 16, 4)
    assert (spec.norm_eps, spec.max_position, spec.bare_layers) == (1e-4, 1 << 18, (0, 1, 2))
    assert [(cache.kind, cache.layers) for cache in spec.caches] == [("state", (0, 1, 2))]
    assert spec_of(tmp_path, MAMBA2, override=2).mamba.layers == (0, 1)  # type: ignore[union-attr]


def test_mamba_has_states_for_each_channel(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MAMBA)
    assert spec.mamba1 is not None
    assert (spec.mamba1.inner, spec.mamba1.rank, spec.mamba1.norm, spec.tied) == (128, 5, "none", True)
    assert [part.shape for part in spec.caches[0].parts] == [(16, 3, 8), (16, 12, 8)]
    assert (spec.bare_layers, spec.wide_stream, spec.norm_eps) == ((0, 1, 2), True, 1e-5)
    assert spec_of(tmp_path, MAMBA, override=2).mamba1.layers == (0, 1)  # type: ignore[union-attr]
    named = {**MAMBA, "intermediate_size": None, "time_step_rank": "auto"}
    assert spec_of(tmp_path, named).mamba1.rank == 4  # type: ignore[union-attr]
    # Nothing attends, so the fields of attention have no meaning, as null too.
    for value in (None, 7):
        attends = {"num_attention_heads": value, "num_key_value_heads": 4, "head_dim": value}
        assert spec_of(tmp_path, {**MAMBA, **attends}) == spec
    falcon = spec_of(tmp_path, FALCON_MAMBA)
    assert falcon.mamba1 is not None
    assert (falcon.mamba1.inner, falcon.mamba1.norm, falcon.mamba1.norm_eps) == (144, "unit", 1e-4)
    assert not falcon.tied


def test_jamba_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, JAMBA)
    assert spec.mamba1 is not None
    assert spec.moe is not None
    assert (spec.mamba1.layers, spec.caches[0].layers) == ((0, 1, 3, 4, 5, 7), (2, 6))
    assert (spec.moe.layers, spec.moe.renormalize, spec.rope.dim) == ((1, 3, 5, 7), False, 0)
    assert [cache.form for cache in spec.caches] == ["gqa", "mamba1"]
    dense = {**JAMBA, "num_experts": 1, "num_experts_per_tok": 1}
    assert spec_of(tmp_path, dense).moe is None
    assert spec_of(tmp_path, {**JAMBA, "attn_layer_period": 1, "attn_layer_offset": 0}).mamba1 is None


@pytest.mark.parametrize("published", [JAMBA, FALCON])
def test_null_key_value_heads_are_as_many_as_heads(published: dict[str, Any], tmp_path: Path) -> None:
    """As in transformers. A missing field has the default of the family instead."""
    heads = {"num_attention_heads": 16, "hidden_size": 64}
    assert spec_of(tmp_path, {**published, **heads, "num_key_value_heads": None}).kv_heads == 16
    missing = {name: value for name, value in published.items() if name != "num_key_value_heads"}
    assert spec_of(tmp_path, {**missing, **heads}).kv_heads == 8


def test_olmo_hybrid_by_defaults(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, OLMO)
    assert spec.delta is not None
    assert spec.delta.layers == (0, 1, 2, 4, 5, 6)
    assert (spec.delta.k_heads, spec.delta.v_heads, spec.delta.k_dim, spec.delta.v_dim) == (4, 4, 12, 24)
    assert (spec.delta.reach, spec.delta.norm_eps, spec.rope.dim) == (2.0, 1e-5, 0)
    assert [cache.kind for cache in spec.caches] == ["full", "state"]
    rotated = {**OLMO, "rope_parameters": None, "rope_theta": 5000.0, "linear_allow_neg_eigval": False}
    spec = spec_of(tmp_path, {**rotated, "num_hidden_layers": 2})
    assert spec.delta is not None
    assert (spec.rope.dim, spec.rope.theta, spec.delta.layers, spec.delta.reach) == (16, 5000.0, (0,), 1.0)


def test_ling_3_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LING)
    assert spec.mla is not None
    assert spec.moe is not None
    assert spec.delta is not None
    assert (spec.mla.q_lora, spec.mla.rope, spec.rope.dim, spec.rope.theta) == (20, 8, 8, 6e6)
    assert (spec.moe.intermediate, spec.moe.shared, spec.moe.layers) == (24, 40, tuple(range(1, 8)))
    assert (spec.delta.layers, spec.delta.floor, spec.delta.k_dim) == ((0, 1, 2, 4, 5, 6), -5.0, 16)
    assert (spec.caches[0].kind, spec.caches[0].layers) == ("latent", (3, 7))


def test_nemotron_joins_each_mixer_with_the_part_behind(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, NEMOTRON)
    assert spec.layers == 5
    assert spec.mamba is not None
    assert spec.moe is not None
    assert (spec.mamba.layers, spec.mamba.high) == ((0, 1, 3, 4), math.inf)
    assert (spec.moe.layers, spec.bare_layers, spec.caches[0].layers) == ((0, 2, 4), (1,), (2,))
    names = WEIGHTS.get(spec.family)(spec).placements
    assert names["backbone.layers.2.mixer.A_log"].parameter == "blocks.1.attention.log_rate"
    assert names["backbone.layers.3.mixer.q_proj.weight"].parameter == "blocks.2.attention.qkv.weight"
    assert names["backbone.layers.6.mixer.up_proj.weight"].parameter == "blocks.3.feed_forward.up.weight"
    assert names["backbone.layers.8.norm.weight"].parameter == "blocks.4.feed_forward_norm.weight"
    named = {**NEMOTRON, "hybrid_override_pattern": None}
    named["layers_block_type"] = [
        {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}[letter] for letter in "MEM*EM-ME"
    ]
    assert spec_of(tmp_path, named) == spec
    assert spec_of(tmp_path, NEMOTRON, override=4).layers == 3


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (LFM2, {"layer_types": ["conv", "full_attention"]}, "layer_types has 2 entries"),
        (LFM2, {"layer_types": ["conv"] * 3 + ["mamba"]}, "layer_types must be a list"),
        (LFM2, {"conv_L_cache": 1}, "conv_L_cache"),
        (MAMBA2, {"n_groups": 3}, "num_heads 8 is not a multiple of n_groups"),
        (MAMBA2, {"expand": 3}, "num_heads 8 times head_dim 16"),
        (MAMBA2, {"hidden_act": "gelu"}, "hidden_act"),
        (MAMBA2, {"attention_bias": True}, "attention_bias"),
        (MAMBA2, {"attn_layer_idx": [1]}, "attn_layer_idx"),
        (MAMBA, {"hidden_act": "gelu"}, "hidden_act"),
        (MAMBA, {"conv_kernel": 1}, "conv_kernel"),
        (MAMBA, {"time_step_rank": 0}, "time_step_rank"),
        (MAMBA, {"attention_bias": True}, "attention_bias"),
        (MAMBA, {"attn_layer_idx": [1]}, "attn_layer_idx"),
        (JAMBA, {"attn_layer_offset": 4}, "attn_layer_offset 4 is not below attn_layer_period 4"),
        (JAMBA, {"expert_layer_offset": 2}, "expert_layer_offset 2 is not below"),
        (JAMBA, {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
        (JAMBA, {"sliding_window": 64}, "sliding_window"),
        (JAMBA, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more"),
        (JAMBA, {"hidden_act": "gelu"}, "hidden_act"),
        (OLMO, {"layer_types": ["mamba"] * 8}, "layer_types must be a list"),
        (OLMO, {"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple"),
        (OLMO, {"linear_gate_rank": 8}, "linear_gate_rank"),
        (OLMO, {"linear_use_gate": False}, "linear_use_gate"),
        (LING, {"expert_swiglu_limit_list": [0, 4]}, "expert_swiglu_limit_list limits activations"),
        (LING, {"share_expert_swiglu_limit_list": 7}, "share_expert_swiglu_limit_list limits activations"),
        (LING, {"no_kda_lora": False}, "no_kda_lora"),
        (LING, {"use_kda_lora": True}, "use_kda_lora"),
        (LING, {"use_mla_nope": True}, "use_mla_nope"),
        (LING, {"gated_attention_proj_granularity_type": "element_wise"}, "gated_attention_proj"),
        (LING, {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        (LING, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        (LING, {"rotary_dim": 16}, "rotary_dim 16 is not qk_rope_head_dim 8"),
        (LING, {"kda_lower_bound": 1}, "kda_lower_bound"),
        (LING, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (LFM2, {"hidden_size": 66}, "num_attention_heads"),
        (NEMOTRON, {"hybrid_override_pattern": "EM*"}, "moe in layer 0"),
        (NEMOTRON, {"hybrid_override_pattern": "ME-*"}, "mlp in layer 2"),
        (NEMOTRON, {"hybrid_override_pattern": "MXE"}, "hybrid_override_pattern must be"),
        (NEMOTRON, {"layers_block_type": ["mamba", "conv"]}, "layers_block_type must be"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        (NEMOTRON, {"mlp_bias": True}, "mlp_bias"),
        (NEMOTRON, {"sliding_window": 64}, "sliding_window"),
        (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts"),
        (NEMOTRON, {"n_groups": 3}, "mamba_num_heads 8 is not a multiple"),
        (NEMOTRON, {"time_step_limit": [0.1, 0.05]}, "time_step_limit"),
        (NEMOTRON, {"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit"),
        (NEMOTRON, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more"),
        (BAMBA, {"partial_rotary_factor": 1.0}, "partial_rotary_factor"),
        (BAMBA, {"mamba_d_head": 8}, "mamba_d_head times mamba_n_heads must be 128"),
        (BAMBA, {"mamba_n_heads": 12}, "mamba_n_heads 12 does not divide"),
        (BAMBA, {"mamba_n_groups": 3}, "mamba_n_heads 8 is not a multiple"),
        (BAMBA, {"hidden_act": "gelu"}, "hidden_act"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (GRANITE, {"layer_types": ["mamba", "attention"]}, "layer_types has 2 entries"),
        (GRANITE, {"layer_types": ["mamba", "conv", "mamba"]}, "layer_types must be a list"),
        (GRANITE, {"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        (FALCON, {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must be a list of 5"),
        (FALCON, {"projectors_bias": True}, "projectors_bias"),
        (FALCON, {"mamba_d_ssm": 60}, "mamba_n_heads 8 does not divide"),
    ],
)
def test_refusals_name_the_field(
    config: dict[str, Any], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        spec_of(tmp_path, {**config, **changes})


def test_granite_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GRANITE)
    assert spec.mamba is not None
    assert spec.moe is not None
    assert (spec.mamba.layers, spec.caches[0].layers, spec.rope.dim) == ((0, 2), (1,), 0)
    assert (spec.moe.shared, spec.moe.intermediate, spec.scales.logits) == (48, 96, 1 / 6)
    # One group has eight equal places for the inputs of B and C, so eight ranks could divide the state.
    assert [part.shape for part in spec.caches[1].parts[1:3]] == [(8, 3, 16)] * 2


def test_falcon_has_layer_numbers_of_its_own_for_states(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FALCON)
    assert [cache.layers for cache in spec.caches] == [(0, 1, 2), (3, 4, 5)]
    assert spec_of(tmp_path, FALCON, override=2).caches[1].layers == (2, 3)


def test_an_override_outside_of_the_published_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be between 1 and 9"):
        spec_of(tmp_path, NEMOTRON, override=10)


def test_ranks_divide_the_channels_of_mamba(tmp_path: Path) -> None:
    """Sixteen equal parts of the channels, fewer if the number of channels is not a multiple of 16."""
    spec = spec_of(tmp_path, MAMBA)
    sharding.check(spec, Layout(tensor=16))
    local = sharding.local_spec(spec, Layout(tensor=4))
    assert local.mamba1 is not None
    assert local.mamba1.inner == 32
    assert local.caches[0].parts[1].shape == (4, 12, 8)
    spec = spec_of(tmp_path, {**MAMBA, "intermediate_size": 132})
    with pytest.raises(ConfigError, match="4 parts of the channels of Mamba; 1 or 2 or 4 would work"):
        sharding.check(spec, Layout(tensor=8))


def test_ranks_that_do_not_divide_the_norms_are_refused(tmp_path: Path) -> None:
    """Two norm groups divide over two ranks, not over four."""
    spec = spec_of(tmp_path, {**NEMOTRON, "num_key_value_heads": 4})
    sharding.check(spec, Layout(tensor=2))
    with pytest.raises(ConfigError, match="2 norm groups of Mamba; 1 or 2 would work"):
        sharding.check(spec, Layout(tensor=4))
