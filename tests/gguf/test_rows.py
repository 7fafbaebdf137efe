"""A model of a family with a row has the parameters and the facts of its source checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.support.gguf_rows import (
    Change,
    as_it_is,
    cut_in_two,
    flat_gate,
    in_pairs,
    kimi_linear,
    llama4_stacks,
    mamba1,
    mamba2,
    one_stack,
    plus_one,
    times,
    two_dims,
    write_saved,
)
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.hub import resolve_model_path
from weft.gguf.checkpoint_folder import gguf_files, weights_of
from weft.gguf.container import Container
from weft.gguf.gguf_names import TensorForm
from weft.models.gguf_tensor import GGUFTensor, Maps
from weft.models.loader import load_model
from weft.ops.coded import dequantize

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
PAIRS = in_pairs(4, 2)
SLIDES = [True, True, True, False]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A family: class of transformers, its settings, and the keys of the file beside the common ones."""

    model: str
    arch: str
    settings: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    change: Callable[..., Any] = as_it_is
    config: str = ""


MAMBA1 = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1),
    "intermediate_size": 160,
    "state_size": 12,
    "time_step_rank": 32,
    "layer_norm_epsilon": 1e-4,
}
MAMBA1_FACTS = {
    "attention.head_count": 0,
    "attention.head_count_kv": 0,
    "attention.layer_norm_rms_epsilon": 1e-4,
    "feed_forward_length": 0,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.inner_size": 160,
    "ssm.time_step_rank": 32,
    "ssm.dt_b_c_rms": False,
}
SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
}
GRANITE = {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.125, "logit_scale": 8.0}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
HEAD = {"attention.key_length": 32, "attention.value_length": 32}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
GEMMA4_FACTS = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False, True, False],
    "rope.freq_base": 1000000.0,
    "rope.freq_base_swa": 10000.0,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "final_logit_softcapping": 30.0,
}
LFM2 = {
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "tie_word_embeddings": True,
}
LFM2_FACTS = {
    "attention.head_count_kv": [0, 2, 0, 2],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1000000.0,
    "shortconv.l_cache": 3,
}
NEMOTRON = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
}
NEMOTRON_FACTS = {
    **HEAD,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 4,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 8,
}
FALCON: dict[str, Any] = {
    "head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.25,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 4.0,
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.5],
    "mlp_multipliers": [0.5, 2.0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
}
HYBRID: dict[str, Any] = {
    **SCALES,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "shared_intermediate_size": 96,
    "position_embedding_type": "nope",
}
HYBRID_FACTS = {
    **GRANITE,
    "attention.head_count_kv": [0, 2, 0, 2],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 1,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 8,
    "rope.scaling.finetuned": False,
}
KIMI = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "num_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.446,
}
KIMI_FACTS = {
    "attention.head_count_kv": [0, 1, 0],
    "attention.kv_lora_rank": 20,
    "attention.key_length": 26,
    "attention.value_length": 72,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 10,
    "rope.dimension_count": 6,
    "ssm.conv_kernel": 3,
    "kda.head_dim": 12,
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 24,
    "expert_gating_func": 2,
    "expert_weights_scale": 2.446,
    "leading_dense_block_count": 1,
}
CASES: dict[str, Case] = {
    "kimi-linear": Case(
        model="KimiLinear",
        arch="KIMI_LINEAR",
        settings=KIMI,
        facts=KIMI_FACTS,
        change=kimi_linear(3, 14, 4),
    ),
    "kimi-linear-older": Case(
        model="KimiLinear",
        arch="KIMI_LINEAR",
        settings={
            **KIMI,
            "linear_num_heads": 5,
            "q_lora_rank": 22,
            "num_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
        facts={
            **KIMI_FACTS,
            "attention.q_lora_rank": 22,
            "expert_count": 6,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_weights_norm": False,
        },
        change=kimi_linear(3, 14, 3),
    ),
    "gemma2": Case(
        model="Gemma2",
        arch="GEMMA2",
        settings={
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        facts={
            **HEAD,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
        },
        change=plus_one,
    ),
    "command-r": Case(
        model="Cohere",
        arch="COMMAND_R",
        settings={"logit_scale": 0.0625, "tie_word_embeddings": True},
        facts={
            "attention.layer_norm_epsilon": 1e-5,
            "logit_scale": 0.0625,
            "rope.freq_base": 500000.0,
            "rope.scaling.type": "none",
        },
    ),
    "gemma": Case(
        model="Gemma",
        arch="GEMMA",
        settings={"head_dim": 32, "tie_word_embeddings": True},
        facts=HEAD,
        change=plus_one,
    ),
    "glm4": Case(
        model="Glm4",
        arch="GLM4",
        settings={"head_dim": 32, "attention_bias": True},
        facts={**HEAD, "rope.dimension_count": 16},
    ),
    "qwen2moe": Case(
        model="Qwen2Moe",
        arch="QWEN2MOE",
        settings={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        facts={
            **EXPERTS,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
        },
        change=flat_gate,
    ),
    "olmoe": Case(
        model="Olmoe",
        arch="OLMOE",
        settings={"num_experts": 4, "num_experts_per_tok": 2},
        facts=EXPERTS,
    ),
    "dots1": Case(
        model="Dots1",
        arch="DOTS1",
        settings={
            "head_dim": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        facts={
            **HEAD,
            **EXPERTS,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        },
    ),
    "starcoder2": Case(
        model="Starcoder2",
        arch="STARCODER2",
        settings={"sliding_window": 4096, "tie_word_embeddings": True},
        facts={"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 16},
    ),
    "llama4": Case(
        model="Llama4",
        config="Llama4Text",
        arch="LLAMA4",
        settings={
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "max_position_embeddings": 10000,
        },
        facts={
            **EXPERTS,
            "expert_used_count": 1,
            "feed_forward_length": 96,
            "expert_feed_forward_length": 32,
            "interleave_moe_layer_step": 2,
            "rope.dimension_count": 16,
            "rope.freq_base": 500000.0,
        },
        change=llama4_stacks,
    ),
    "falcon-h1": Case(
        model="FalconH1",
        arch="FALCON_H1",
        settings=FALCON,
        facts={
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.freq_base": 1e11,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 2,
            "ssm.inner_size": 128,
            "ssm.time_step_rank": 8,
        },
        change=mamba2(2, times(FALCON)),
    ),
    "granitehybrid": Case(
        model="GraniteMoeHybrid",
        arch="GRANITE_HYBRID",
        settings={**HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 96},
        facts=HYBRID_FACTS,
        change=cut_in_two(mamba2(1, PAIRS), ""),
    ),
    "granitehybrid-experts": Case(
        model="GraniteMoeHybrid",
        arch="GRANITE_HYBRID",
        settings={**HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        facts={
            **HYBRID_FACTS,
            **EXPERTS,
            "feed_forward_length": 32,
            "expert_shared_feed_forward_length": 96,
        },
        change=cut_in_two(mamba2(1, PAIRS)),
    ),
    "gemma3": Case(
        model="Gemma3",
        config="Gemma3Text",
        arch="GEMMA3",
        settings={
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            },
        },
        facts={
            **HEAD,
            "attention.sliding_window": 8,
            "rope.freq_base": 1000000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        change=plus_one,
    ),
    "glm4moe": Case(
        model="Glm4Moe",
        arch="GLM4_MOE",
        settings={
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
        },
        facts={
            **HEAD,
            **EXPERTS,
            "rope.dimension_count": 16,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
        },
    ),
    "phi3": Case(
        model="Phi3",
        arch="PHI3",
        settings={"sliding_window": 15, "original_max_position_embeddings": 256},
        facts={
            "rope.dimension_count": 16,
            "rope.scaling.original_context_length": 256,
            "attention.sliding_window": 15,
        },
    ),
    "phi3-long": Case(
        model="Phi3",
        arch="PHI3",
        settings={
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.25, 1.5],
                "long_factor": [1.08, 1.7, 2.5, 9.0],
                "original_max_position_embeddings": 64,
            },
        },
        facts={
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
            "attention.sliding_window": 0,
        },
    ),
    "granite": Case(model="Granite", arch="GRANITE", settings=SCALES, facts=GRANITE, change=PAIRS),
    "granitemoe": Case(
        model="GraniteMoe",
        arch="GRANITE_MOE",
        settings={**SCALES, "num_local_experts": 4, "num_experts_per_tok": 2},
        facts={**GRANITE, **EXPERTS},
        change=cut_in_two(PAIRS),
    ),
    "granitemoe-shared": Case(
        model="GraniteMoeShared",
        arch="GRANITE_MOE",
        settings={
            **SCALES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
        facts={**GRANITE, **EXPERTS, "expert_shared_feed_forward_length": 64},
        change=cut_in_two(PAIRS),
    ),
    "olmo2": Case(model="Olmo2", arch="OLMO2"),
    "olmo3": Case(
        model="Olmo3",
        arch="OLMO2",
        settings={
            "sliding_window": 8,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.25,
                    "beta_fast": 16.0,
                    "beta_slow": 2.0,
                },
            },
        },
        facts={
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": SLIDES,
            "rope.freq_base": 500000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_attn_factor": 1.25,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        },
    ),
    "smollm3": Case(
        model="SmolLM3",
        arch="SMOLLM3",
        settings={"tie_word_embeddings": True},
        facts={"rope.freq_base": 2000000.0, "rope.dimension_count": 16},
        change=PAIRS,
    ),
    "exaone4": Case(
        model="Exaone4",
        arch="EXAONE4",
        settings={"sliding_window": 8, "head_dim": 32},
        facts={**HEAD, "attention.sliding_window": 8, "attention.sliding_window_pattern": SLIDES},
    ),
    "exaone4-full": Case(
        model="Exaone4",
        arch="EXAONE4",
        settings={"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "ernie4_5": Case(
        model="Ernie4_5",
        arch="ERNIE4_5",
        settings={"head_dim": 32, "use_bias": True},
        facts={**HEAD, "rope.freq_base": 500000.0},
    ),
    "ernie4_5-moe": Case(
        model="Ernie4_5_Moe",
        arch="ERNIE4_5_MOE",
        settings={
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_interval": 2,
        },
        facts={
            **EXPERTS,
            "rope.freq_base": 500000.0,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 48,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 2,
        },
    ),
    "hunyuan-dense": Case(
        model="HunYuanDenseV1", arch="HUNYUAN_DENSE", settings={"head_dim": 32}, facts=HEAD
    ),
    "hunyuan-moe": Case(
        model="HunYuanMoEV1",
        arch="HUNYUAN_MOE",
        settings={"num_experts": 4, "moe_topk": 2, "head_dim": 16},
        facts={
            **EXPERTS,
            "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 96,
            "expert_shared_count": 1,
        },
    ),
    "minimax-m2": Case(
        model="MiniMaxM2",
        arch="MINIMAXM2",
        settings={"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16},
        facts={
            **HEAD,
            **EXPERTS,
            "rope.freq_base": 5000000.0,
            "expert_feed_forward_length": 96,
            "expert_gating_func": 2,
            "rope.dimension_count": 16,
        },
    ),
    "seed_oss": Case(
        model="SeedOss", arch="SEED_OSS", settings={"head_dim": 32, "attention_out_bias": True}, facts=HEAD
    ),
    "mistral3": Case(
        model="Mistral",
        arch="MISTRAL3",
        settings={"head_dim": 32, "sliding_window": None},
        facts={**HEAD, "rope.freq_base": 10000.0, "rope.dimension_count": 32},
        change=PAIRS,
    ),
    "ministral3": Case(
        model="Ministral3",
        arch="MISTRAL3",
        settings={
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        facts={
            **HEAD,
            "rope.freq_base": 1000000.0,
            "rope.dimension_count": 32,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        change=PAIRS,
    ),
    "gemma4": Case(
        model="Gemma4",
        config="Gemma4Text",
        arch="GEMMA4",
        settings={
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
        },
        facts={
            **GEMMA4_FACTS,
            "attention.head_count_kv": 2,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 16,
            "feed_forward_length": [96, 96, 192, 192],
        },
    ),
    "gemma4-experts": Case(
        model="Gemma4",
        config="Gemma4Text",
        arch="GEMMA4",
        settings={
            **GEMMA4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        facts={
            **GEMMA4_FACTS,
            **EXPERTS,
            "attention.head_count_kv": [2, 1, 2, 1],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "expert_feed_forward_length": 32,
        },
    ),
    "lfm2": Case(
        model="Lfm2",
        arch="LFM2",
        settings={**LFM2, "block_auto_adjust_ff_dim": False},
        facts=LFM2_FACTS,
        change=two_dims,
    ),
    "lfm2moe": Case(
        model="Lfm2Moe",
        arch="LFM2MOE",
        settings={
            **LFM2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
        facts={
            **LFM2_FACTS,
            **EXPERTS,
            "expert_feed_forward_length": 32,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        change=two_dims,
    ),
    "nemotron_h": Case(
        model="NemotronH",
        arch="NEMOTRON_H",
        settings={**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
        facts={
            **NEMOTRON_FACTS,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 96, 0, 96],
        },
        change=mamba2(4, PAIRS),
    ),
    "nemotron_h_moe": Case(
        model="NemotronH",
        arch="NEMOTRON_H_MOE",
        settings={**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
        facts={
            **NEMOTRON_FACTS,
            **EXPERTS,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 32, 0, 32],
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
        },
        change=mamba2(4, PAIRS),
    ),
    "mamba2": Case(
        model="Mamba2",
        arch="MAMBA2",
        settings={
            **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads")),
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 4,
            "state_size": 16,
        },
        facts={
            "attention.head_count": 0,
            "attention.head_count_kv": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "feed_forward_length": 0,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 4,
            "ssm.inner_size": 128,
            "ssm.time_step_rank": 8,
        },
        change=mamba2(4, as_it_is),
    ),
    "mamba": Case(
        model="Mamba",
        arch="MAMBA",
        settings={**MAMBA1, "tie_word_embeddings": True, "use_conv_bias": False},
        facts=MAMBA1_FACTS,
        change=mamba1(as_it_is),
    ),
    "falcon-mamba": Case(
        model="FalconMamba",
        arch="MAMBA",
        settings=MAMBA1,
        facts={**MAMBA1_FACTS, "ssm.dt_b_c_rms": True},
        change=mamba1(as_it_is),
    ),
    "jamba": Case(
        model="Jamba",
        arch="JAMBA",
        settings={
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "mamba_d_state": 12,
            "mamba_dt_rank": 32,
        },
        facts={
            **EXPERTS,
            "attention.head_count_kv": [0, 0, 2, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 12,
            "ssm.inner_size": 128,
            "ssm.time_step_rank": 32,
        },
        change=mamba1(as_it_is),
    ),
    "cohere2": Case(
        model="Cohere2",
        arch="COHERE2",
        settings={"sliding_window": 8, "logit_scale": 0.0625, "tie_word_embeddings": True},
        facts={
            "attention.sliding_window": 8,
            "attention.layer_norm_epsilon": 1e-5,
            "logit_scale": 0.0625,
            "rope.dimension_count": 16,
            "rope.scaling.type": "none",
        },
    ),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(case: Case, folder: Path) -> Any:
    """Save a random model of the family. Return its configuration."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{case.config or case.model}Config")(**{**SIZES, **case.settings})
    model = getattr(transformers, f"{case.model}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    for name, values in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(values)
    model.save_pretrained(folder)
    return config


def write(case: Case, folder: Path, path: Path, config: Any, kind: str = "F32", **more: Any) -> None:
    """Write the GGUF file of the checkpoint in ``folder``."""
    facts = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": SIZES["num_key_value_heads"],
    }
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        facts["attention.layer_norm_rms_epsilon"] = float(eps)
    change: Change = case.change
    tensors = {}
    rope = getattr(config, "rope_parameters", None) or {}
    for name in ("long", "short"):
        if values := rope.get(f"{name}_factor"):
            tensors[f"rope_factors_{name}.weight"] = np.array(values, np.float32)
    if case.arch == "GEMMA4":
        tensors["rope_freqs.weight"] = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    arch = gguf.MODEL_ARCH[case.arch]
    facts |= case.facts | more
    write_saved(path, folder, arch, facts, change, more=tensors, kind=kind, layers=config.num_hidden_layers)


def loaded(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    folder = resolve_model_path(name)
    spec = load_spec(folder)
    model = load_model(folder, spec, torch.float32, torch.device("cpu"), progress=False, pack=False)
    return spec, {key: value.detach() for key, value in model.named_parameters()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "falcon-h1"])
def test_parameters_and_facts_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = saved(case, tmp_path / "saved")
    write(case, tmp_path / "saved", tmp_path / "model.gguf", config)
    theirs, expected = loaded(str(tmp_path / "saved"))
    spec, found = loaded(str(tmp_path / "model.gguf"))
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        if (case.change is plus_one and "norm" in key) or key.endswith("log_rate"):
            assert torch.allclose(found[key], weight, rtol=0, atol=1e-6), key
        else:
            assert torch.equal(found[key], weight), key
    changed = {"architectures", "eos_ids", "dtype", "bos_id"}
    for fact in spec.__struct_fields__:
        if fact not in changed:
            assert getattr(spec, fact) == getattr(theirs, fact), fact
    assert spec.eos_ids == (2,)


def test_factors_of_falcon_h1_are_in_the_weights(tmp_path: Path) -> None:
    """The parameters are those of a checkpoint with the same products, and all factors 1."""
    case, folder = CASES["falcon-h1"], tmp_path / "saved"
    config = saved(case, folder)
    write(case, folder, tmp_path / "model.gguf", config)
    tensors = load_file(folder / "model.safetensors")
    change = times(FALCON)
    products = {name: value for name, tensor in tensors.items() for _, value in change(name, tensor)}
    save_file(products, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    for name, value in FALCON.items():
        if name.endswith(("_multiplier", "_multipliers")):
            fields[name] = [1.0] * len(value) if isinstance(value, list) else 1.0
    (folder / "config.json").write_text(json.dumps(fields))
    theirs, expected = loaded(str(folder))
    spec, found = loaded(str(tmp_path / "model.gguf"))
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[key], expected[key], rtol=0, atol=1e-6) for key in expected)
    for fact in ("mamba", "parallel", "scales", "rope", "caches", "norm_eps"):
        assert getattr(spec, fact) == getattr(theirs, fact), fact


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gate_and_up_of_experts_in_one_stack(kind: str, tmp_path: Path) -> None:
    case = CASES["glm4moe"]
    config = saved(case, tmp_path / "saved")
    write(case, tmp_path / "saved", tmp_path / "apart.gguf", config, kind=kind)
    write(
        msgspec.structs.replace(case, change=one_stack(case.change)),
        *(tmp_path / "saved", tmp_path / "fused.gguf", config),
        kind=kind,
    )
    names = {stored.name for stored in Container(tmp_path / "fused.gguf").tensors()}
    assert "blk.1.ffn_gate_up_exps.weight" in names
    assert "blk.1.ffn_gate_exps.weight" not in names
    (_, apart), (_, fused) = (loaded(str(tmp_path / f"{name}.gguf")) for name in ("apart", "fused"))
    assert fused.keys() == apart.keys()
    assert all(torch.equal(fused[key], apart[key]) for key in apart)
    (file,) = gguf_files(Path(resolve_model_path(str(tmp_path / "fused.gguf"))))
    maps, packed = Maps(), 0
    for one, weight in weights_of(file).items():
        tensor = GGUFTensor(weight, maps)
        if weight.form in (TensorForm.GATE, TensorForm.UP) and (codes := tensor.codes(lambda _: True)):
            (piece,) = codes[1]
            assert piece.codes is not None
            assert torch.equal(dequantize(piece.codes, torch.float32), tensor[()]), one
            packed += 1
    assert packed == (0 if kind == "F32" else 3 * 4 * 2)


@pytest.mark.parametrize(
    "name", ["gemma3", "glm4moe", "phi3", "granitemoe-shared", "lfm2moe", "mamba2", "nemotron_h_moe"]
)
def test_codes_of_packed_types_are_the_values(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = saved(case, tmp_path / "saved")
    write(case, tmp_path / "saved", tmp_path / "model.gguf", config, kind="Q8_0")
    (file,) = gguf_files(Path(resolve_model_path(str(tmp_path / "model.gguf"))))
    maps, matrices = Maps(), 0
    for one, weight in weights_of(file).items():
        tensor = GGUFTensor(weight, maps)
        if (codes := tensor.codes(lambda _: True)) is not None:
            (piece,) = codes[1]
            assert piece.codes is not None
            assert torch.equal(dequantize(piece.codes, torch.float32), tensor[()]), one
            matrices += 1
    stored = Container(tmp_path / "model.gguf").tensors()
    assert matrices >= sum(tensor.kind == "Q8_0" for tensor in stored)


@pytest.mark.parametrize(
    ("name", "facts", "why"),
    [
        ("kimi-linear", {"expert_gating_func": 1}, r"expert_gating_func must be 2"),
        ("kimi-linear", {"attention.head_count_kv": [0, 1]}, "a number for each of 3 layers"),
        ("granite", {"rope.scaling.finetuned": False}, "Granite without RoPE"),
        ("glm4moe", {"expert_gating_func": 1}, r"expert_gating_func must be 2"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "has 1 entries for 4 layers"),
        ("exaone4", {"attention.sliding_window_pattern": 0}, "must be a period or a list"),
        ("olmo2", {"rope.dimension_count": 8}, "partial RoPE"),
        ("llama4", {"attention.sliding_window": 0}, "llama4 without chunks"),
        ("granitehybrid", {"rope.scaling.finetuned": True}, r"granitehybrid with RoPE \(Bamba\)"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "a number for each of 4 layers"),
        ("phi3-long", {"rope.dimension_count": 6}, "long_factor must be a list of 3"),
    ],
)
def test_other_forms_are_refused(name: str, facts: dict[str, Any], why: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = saved(case, tmp_path / "saved")
    write(case, tmp_path / "saved", tmp_path / "model.gguf", config, **facts)
    with pytest.raises(ConfigError, match=why):
        load_spec(resolve_model_path(str(tmp_path / "model.gguf")))
