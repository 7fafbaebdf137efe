"""Fields of config.json of further architectures in ``weft.gguf.rows``; see ``weft.gguf.row_facts``."""

from __future__ import annotations

import math

from weft.common.errors import ConfigError
from weft.gguf.model_facts import ModelFacts
from weft.gguf.row_facts import SIGMOID, Fields, Tensors, biases, granite, need_scores, windows

_GEMMA2_WINDOW, _GEMMA2_CAP = 4096, 50.0
_GEMMA2_LARGEST = 46
"""Layers of Gemma 2 27B, the only size with another attention scale."""
_STARCODER2_WINDOW = 4096
_LLAMA4_CHUNK, _LLAMA4_SCALE, _LLAMA4_STEP = 8192, 0.1, 4
_MAVERICK = 128
"""Experts of Llama 4 Maverick, the size without a norm of queries and keys."""
_GRANITE_HYBRID_CONTEXT = 131072
"""Context of all published sizes. The converter writes another, constant number."""


def gemma2(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of Gemma 2. Raises ConfigError."""
    # Constants of llama.cpp: full attention in every second layer; default window and cap; the attention
    # scale is by head size, except in the largest model.
    scale = facts.integer("attention.key_length")
    if facts.layers == _GEMMA2_LARGEST:
        scale = facts.integer("embedding_length") // facts.heads
    made = windows(facts, 2, _GEMMA2_WINDOW) | {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", _GEMMA2_CAP),
    }
    if facts.has("final_logit_softcapping"):
        made["final_logit_softcapping"] = facts.number("final_logit_softcapping")
    return made


def gemma(_: ModelFacts, __: Tensors) -> Fields:
    """Return the activation of Gemma 1."""
    return {"hidden_act": "gelu_pytorch_tanh"}


def command_r(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of Command R and Aya. Raises ConfigError."""
    return {"logit_scale": facts.number("logit_scale")}


def glm4(_: ModelFacts, tensors: Tensors) -> Fields:
    """Return the biases of GLM-4."""
    return biases(tensors, attention_bias="attn_q")


def qwen2moe(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Qwen1.5-MoE and Qwen2-57B-A14B. Raises ConfigError."""
    return {
        **biases(tensors, qkv_bias="attn_q"),
        "num_experts": facts.experts,
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def olmoe(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of OLMoE. Raises ConfigError."""
    return {
        "num_experts": facts.experts,
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "norm_topk_prob": False,
    }


def dots1(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of dots.llm1. Raises ConfigError."""
    need_scores(facts, SIGMOID)
    return {
        "n_routed_experts": facts.experts,
        "n_shared_experts": facts.integer("expert_shared_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "first_k_dense_replace": facts.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
    }


def starcoder2(_: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of StarCoder 2. All published sizes have the same window."""
    made = biases(tensors, use_bias="attn_q")
    return made | {"hidden_act": "gelu_pytorch_tanh", "sliding_window": _STARCODER2_WINDOW}


def llama4(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of Llama 4. Raises ConfigError."""
    if not facts.integer("attention.sliding_window", 1):
        raise ConfigError("GGUF: llama4 without chunks of attention is not supported here", param="--model")
    # Constants of llama.cpp: chunk size, layers without RoPE, and the temperature of queries.
    return {
        "intermediate_size": facts.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": facts.integer("feed_forward_length"),
        "num_local_experts": facts.experts,
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "interleave_moe_layer_step": facts.integer("interleave_moe_layer_step"),
        "no_rope_layer_interval": _LLAMA4_STEP,
        "attention_chunk_size": _LLAMA4_CHUNK,
        "attn_temperature_tuning": True,
        "attn_scale": _LLAMA4_SCALE,
        "floor_scale": _LLAMA4_CHUNK,
        "use_qk_norm": facts.experts != _MAVERICK,
    }


def kimi_linear(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Kimi Linear beside latent attention. Raises ConfigError."""
    need_scores(facts, SIGMOID)
    # Layers without KV heads are Kimi Delta Attention. Only a tensor's shape has the number of heads.
    types = [
        "full_attention" if heads else "linear_attention"
        for heads in facts.per_layer("attention.head_count_kv")
    ]
    recurrent = [i for i, kind in enumerate(types) if kind == "linear_attention"]
    rates = tensors.get(f"blk.{recurrent[0]}.ssm_a") if recurrent else None
    groups = facts.integer("expert_group_count", 1) or 1
    return {
        "layer_types": types,
        "linear_num_heads": math.prod(rates.shape) if rates is not None else facts.heads,
        "linear_head_dim": facts.integer("kda.head_dim"),
        "linear_conv_kernel_dim": facts.integer("ssm.conv_kernel"),
        "n_routed_experts": facts.experts,
        "n_shared_experts": facts.integer("expert_shared_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "first_k_dense_replace": facts.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "n_group": groups,
        "topk_group": facts.integer("expert_group_used_count", groups) or groups,
    }


def falcon_h1(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Falcon-H1. The file's weights include all factors. Raises ConfigError."""
    return _mamba2(facts, tensors) | {
        "mamba_d_ssm": facts.integer("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_norm_before_gate": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def mamba2(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Mamba2 without attention. Files have 0 for attention heads. Raises ConfigError."""
    sizes = _mamba2(facts, tensors)
    heads, inner = sizes["mamba_n_heads"], facts.integer("ssm.inner_size")
    return {
        "num_heads": heads,
        "head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "expand": inner // facts.integer("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": inner,
    }


def mamba(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Mamba and Falcon Mamba. Raises ConfigError.

    Falcon Mamba normalizes time steps, B and C. The epsilon is the default of transformers, because no key
    has the epsilon.
    """
    normed = facts.flag("ssm.dt_b_c_rms", False)
    falcon = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    return {
        "state_size": facts.integer("ssm.state_size"),
        "conv_kernel": facts.integer("ssm.conv_kernel"),
        "time_step_rank": facts.integer("ssm.time_step_rank"),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
        "intermediate_size": facts.integer("ssm.inner_size"),
        **(falcon if normed else {}),
    }


def jamba(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Jamba. Layers without KV heads are Mamba. Raises ConfigError."""
    attending = [i for i, heads in enumerate(facts.per_layer("attention.head_count_kv")) if heads]
    routing = [i for i in range(facts.layers) if f"blk.{i}.ffn_gate_inp.weight" in tensors]
    recurrent = next((i for i in range(facts.layers) if i not in attending), 0)
    inner, hidden = facts.integer("ssm.inner_size"), facts.integer("embedding_length")
    return {
        **_every(facts, "attn", attending),
        **_every(facts, "expert", routing),
        "num_experts": facts.experts if routing else 1,
        "num_experts_per_tok": facts.integer("expert_used_count") if routing else 1,
        "mamba_expand": inner // hidden,
        "mamba_d_state": facts.integer("ssm.state_size"),
        "mamba_d_conv": facts.integer("ssm.conv_kernel"),
        "mamba_dt_rank": facts.integer("ssm.time_step_rank"),
        "mamba_conv_bias": f"blk.{recurrent}.ssm_conv1d.bias" in tensors,
        "mamba_proj_bias": False,
    }


def _every(facts: ModelFacts, part: str, chosen: list[int]) -> Fields:
    """Return period and offset of the layers ``chosen`` of Jamba. Raises ConfigError for other layers."""
    first = chosen[0] if chosen else 0
    # For one layer, the period is beyond the last layer. For no layer, the offset is.
    period = chosen[1] - first if len(chosen) > 1 else facts.layers + 1
    offset = first if chosen else facts.layers
    if chosen != list(range(offset, facts.layers, period)):
        raise ConfigError(
            f"GGUF: jamba with {part} layers {chosen}, which have no fixed period, is not supported",
            param="--model",
        )
    return {f"{part}_layer_period": period, f"{part}_layer_offset": offset}


def granite_hybrid(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Granite 4 with Mamba2. Layers without KV heads are Mamba2. Raises ConfigError."""
    if facts.flag("rope.scaling.finetuned", False):
        raise ConfigError("GGUF: granitehybrid with RoPE (Bamba) is not supported here", param="--model")
    shared = "expert_shared_feed_forward_length" if facts.experts else "feed_forward_length"
    types = ["attention" if heads else "mamba" for heads in facts.per_layer("attention.head_count_kv")]
    scales = granite(facts, tensors, rotated=False)
    attends = types.index("attention") if "attention" in types else 0
    return {
        **{name: scales[name] for name in scales if name not in ("mlp_bias", "intermediate_size")},
        **_mamba2(facts, tensors, types.index("mamba") if "mamba" in types else 0),
        "attention_bias": f"blk.{attends}.attn_q.bias" in tensors,
        "mamba_expand": facts.integer("ssm.inner_size") // facts.integer("embedding_length"),
        "num_local_experts": facts.experts,
        "num_experts_per_tok": facts.integer("expert_used_count") if facts.experts else 0,
        "intermediate_size": facts.integer("feed_forward_length"),
        "shared_intermediate_size": facts.integer(shared),
        "layer_types": types,
        "position_embedding_type": "nope",
        "max_position_embeddings": min(facts.integer("context_length"), _GRANITE_HYBRID_CONTEXT),
    }


def _mamba2(facts: ModelFacts, tensors: Tensors, layer: int = 0) -> Fields:
    """Return the sizes of Mamba2, with the names of Granite and Falcon-H1. ``layer``: a Mamba2 layer."""
    heads = facts.integer("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": facts.integer("ssm.inner_size") // max(heads, 1),
        "mamba_n_groups": facts.integer("ssm.group_count"),
        "mamba_d_state": facts.integer("ssm.state_size"),
        "mamba_d_conv": facts.integer("ssm.conv_kernel"),
        "mamba_conv_bias": f"blk.{layer}.ssm_conv1d.bias" in tensors,
        "mamba_proj_bias": False,
    }
