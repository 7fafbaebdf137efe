"""Fields of config.json of the architectures in ``weft.gguf.rows``, from the metadata of a GGUF file.

Keys follow the GGUF specification. Some facts are constants of llama.cpp, not in the file. Comments name the
constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from weft.common.errors import ConfigError
from weft.gguf.container import StoredTensor
from weft.gguf.model_facts import ModelFacts

Tensors: TypeAlias = Mapping[str, StoredTensor]
Fields: TypeAlias = dict[str, Any]
SIGMOID = 2
_LOCAL_THETA = 10000.0
_GEMMA3_LARGEST = 62
"""Layers of Gemma 3 27B, the only size with another attention scale."""


def head_size(facts: ModelFacts, *, partial: bool) -> Fields:
    """Return the size of a head, and the share of rotated dims if ``partial``. Raises ConfigError."""
    size = facts.head_size
    if facts.integer("attention.value_length", size) != size:
        raise ConfigError("GGUF: keys and values of different sizes are not supported here", param="--model")
    rotated = facts.integer("rope.dimension_count", size)
    if partial:
        share = {} if rotated == size else {"partial_rotary_factor": rotated / size}
        return {"head_dim": size, **share}
    if rotated != size:
        raise ConfigError("GGUF: heads with partial RoPE are not supported here", param="--model")
    return {"head_dim": size}


def biases(tensors: Tensors, **fields: str) -> Fields:
    """Return each of ``fields`` as true if the first layer has a bias of the named tensor."""
    return {field: f"blk.0.{name}.bias" in tensors for field, name in fields.items()}


def windows(facts: ModelFacts, period: int, default: int = 0) -> Fields:
    """Return the window and the types of the layers; without a window, only null for the window.

    Without a pattern in the file, each last of ``period`` layers has full attention. ``default``: window for
    a file without a window; 0 for none. Raises ConfigError.
    """
    window = facts.integer("attention.sliding_window", default)
    if not window:
        return {"sliding_window": None}
    layers = facts.layers
    pattern = facts.pattern("attention.sliding_window_pattern", period)
    slides = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    if len(slides) < layers:
        raise ConfigError(
            f"the GGUF file's sliding_window_pattern has {len(slides)} entries for {layers} layers",
            param="--model",
        )
    types = ["sliding_attention" if each else "full_attention" for each in slides[:layers]]
    return {"sliding_window": window, "layer_types": types}


def yarn_details(facts: ModelFacts) -> Fields:
    """Return the details of the scaling yarn that the file has. Raises ConfigError."""
    keys = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
    made: Fields = {
        field: facts.number(f"rope.scaling.yarn_{key}")
        for field, key in keys.items()
        if facts.has(f"rope.scaling.yarn_{key}")
    }
    if facts.family == "ministral3":  # here the multiplier is the published value, not a tenth
        scale = facts.number("rope.scaling.yarn_log_multiplier")
        made |= {"mscale": scale, "mscale_all_dim": scale}
        made["llama_4_scaling_beta"] = facts.number("attention.temperature_scale")
    return made


def gemma3(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of Gemma 3. Raises ConfigError."""
    # Constants of llama.cpp: full attention in every sixth layer; default RoPE base of window layers; the
    # attention scale is by head size, except in the largest model.
    scale = facts.integer("attention.key_length")
    if facts.layers == _GEMMA3_LARGEST:
        scale = facts.integer("embedding_length") // facts.heads
    made = windows(facts, 6) | {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "rope_local_base_freq": facts.number("rope.freq_base_swa", _LOCAL_THETA),
    }
    if facts.has("final_logit_softcapping"):
        made["final_logit_softcapping"] = facts.number("final_logit_softcapping")
    return made


def gemma4(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Gemma 4: dense, with layer inputs, and with experts. Raises ConfigError."""
    made = windows(facts, 6)
    types = made.get("layer_types", [])
    if not {"full_attention", "sliding_attention"} <= set(types):
        raise ConfigError("GGUF: gemma4 needs a sliding_window_pattern with both types", param="--model")
    full, sliding = types.index("full_attention"), types.index("sliding_attention")
    kv_heads, inner = facts.per_layer("attention.head_count_kv"), facts.per_layer("feed_forward_length")
    equal = f"blk.{full}.attn_v.weight" not in tensors
    size = facts.integer("attention.key_length")
    made |= {
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": facts.integer("attention.key_length_swa"),
        "global_head_dim": size,
        "num_key_value_heads": kv_heads[sliding],
        "num_global_key_value_heads": kv_heads[full] if equal else None,
        "attention_k_eq_v": equal,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_kv_shared_layers": facts.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": facts.integer("embedding_length_per_layer_input", 0),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": facts.number("rope.freq_base_swa", _LOCAL_THETA),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": facts.number("rope.freq_base"),
                "partial_rotary_factor": _rotated_share(tensors, size),
            },
        },
    }
    if facts.integer("rope.dimension_count_swa", made["head_dim"]) != made["head_dim"]:
        raise ConfigError("GGUF: window layers with partial RoPE are not supported", param="--model")
    if not equal and len(set(kv_heads)) > 1:
        raise ConfigError("GGUF: gemma4 needs attention_k_eq_v or equal KV heads per layer", param="--model")
    if (table := tensors.get("per_layer_token_embd.weight")) is not None:
        made["vocab_size_per_layer_input"] = table.shape[0]
    if facts.has("final_logit_softcapping"):
        made["final_logit_softcapping"] = facts.number("final_logit_softcapping")
    if facts.experts:
        made |= {"enable_moe_block": True, "num_experts": facts.experts}
        made["top_k_experts"] = facts.integer("expert_used_count")
        made["moe_intermediate_size"] = facts.integer("expert_feed_forward_length")
    return made


def _rotated_share(tensors: Tensors, size: int) -> float:
    """Return the share of rotated dims in full layers. The file has huge divisors for the other dims.

    Raises ConfigError for other divisors.
    """
    stored = tensors.get("rope_freqs.weight")
    divisors = [] if stored is None else [float(value) for value in stored.data]
    rotated = sum(value == 1 for value in divisors)
    if len(divisors) != size // 2 or min(divisors[rotated:], default=1e30) < 1e29:
        raise ConfigError("the GGUF file's rope_freqs.weight does not fit Gemma 4", param="--model")
    return 2 * rotated / size


def lfm2(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of LFM2 and LFM2-MoE. Layers without KV heads are convolutions.

    Raises ConfigError.
    """
    heads = facts.per_layer("attention.head_count_kv")
    made: Fields = {
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": facts.integer("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
    }
    if not facts.experts:
        return made
    need_scores(facts, SIGMOID)
    return made | {
        "num_experts": facts.experts,
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "num_dense_layers": facts.integer("leading_dense_block_count"),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }


def nemotron_h(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Nemotron-H and Nemotron 3. The sizes of a layer give its type.

    Raises ConfigError.
    """
    heads, inner = facts.per_layer("attention.head_count_kv"), facts.per_layer("feed_forward_length")
    block = "moe" if facts.experts else "mlp"
    types = ["attention" if h else block if n else "mamba" for h, n in zip(heads, inner, strict=True)]
    mixers = facts.integer("ssm.time_step_rank")
    made: Fields = {
        "layers_block_type": types,
        "mamba_num_heads": mixers,
        "mamba_head_dim": facts.integer("ssm.inner_size") // max(mixers, 1),
        "n_groups": facts.integer("ssm.group_count"),
        "ssm_state_size": facts.integer("ssm.state_size"),
        "conv_kernel": facts.integer("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "layer_norm_epsilon": facts.number("attention.layer_norm_rms_epsilon"),
        "mlp_hidden_act": "relu2",
    }
    if not facts.experts:
        return made
    need_scores(facts, SIGMOID)
    groups = facts.integer("expert_group_count", 1) or 1
    return made | {
        "n_routed_experts": facts.experts,
        "n_shared_experts": facts.integer("expert_shared_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": facts.integer("moe_latent_size", 0) or None,
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": facts.integer("expert_group_used_count", groups) or groups,
    }


def glm4moe(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of GLM-4.5 and Solar Open: the files differ in norms and rotated dims.

    Raises ConfigError.
    """
    need_scores(facts, SIGMOID)
    groups = facts.integer("expert_group_count", 1) or 1
    return {
        **biases(tensors, attention_bias="attn_q"),
        "partial_rotary_factor": facts.integer("rope.dimension_count")
        / facts.integer("attention.key_length"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "n_routed_experts": facts.experts,
        "n_shared_experts": facts.integer("expert_shared_count", 0),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "first_k_dense_replace": facts.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": facts.integer("expert_group_used_count", groups) or groups,
        "num_nextn_predict_layers": 0,
    }


def phi3(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Phi-3 and Phi-4: the window, and two sets of divisors. Raises ConfigError."""
    made: Fields = {"sliding_window": facts.integer("attention.sliding_window", 0) or None}
    original = facts.integer("rope.scaling.original_context_length", facts.integer("context_length"))
    made["original_max_position_embeddings"] = original
    long, short = (tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is None and short is None:
        return made
    if long is None or short is None or {long.kind, short.kind} != {"F32"}:
        raise ConfigError(
            "the GGUF file needs rope_factors_long.weight and rope_factors_short.weight in F32",
            param="--model",
        )
    scaling: Fields = {
        "rope_type": "longrope",
        "long_factor": _numbers(long),
        "short_factor": _numbers(short),
    }
    stretch = facts.integer("context_length") / original
    derived = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    factor = facts.number("rope.scaling.attn_factor", derived)
    if abs(factor - derived) > 1e-5 * derived:
        scaling["attention_factor"] = factor
    return made | {"rope_scaling": scaling}


def granite(facts: ModelFacts, tensors: Tensors, *, rotated: bool = True) -> Fields:
    """Return the facts of Granite, dense and with experts. Raises ConfigError."""
    if rotated and not facts.flag("rope.scaling.finetuned", True):
        raise ConfigError("GGUF: Granite without RoPE is not supported here", param="--model")
    made: Fields = {
        **biases(tensors, attention_bias="attn_q"),
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "attention_multiplier": facts.number("attention.scale"),
        "logits_scaling": facts.number("logit_scale"),
    }
    if not facts.experts:
        return made | biases(tensors, mlp_bias="ffn_gate") | _dense_size(tensors)
    made |= {"num_local_experts": facts.experts, "num_experts_per_tok": facts.integer("expert_used_count")}
    if facts.family == "granitemoe-shared":
        made["shared_intermediate_size"] = facts.integer("expert_shared_feed_forward_length")
    return made


def olmo2(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of OLMo 2, and of OLMo 3 with windows. Raises ConfigError."""
    made = biases(tensors, attention_bias="attn_q")
    return made | (windows(facts, 4) if facts.family == "olmo3" else {})


def smollm3(_: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of SmolLM3. Every fourth layer has no RoPE, a constant of llama.cpp."""
    made = biases(tensors, attention_bias="attn_q", mlp_bias="ffn_gate")
    return made | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def exaone4(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of EXAONE 4: windows, or none in the small models. Raises ConfigError."""
    return windows(facts, 4)


def ernie(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Ernie 4.5, dense and with experts. Raises ConfigError."""
    made = biases(tensors, use_bias="attn_q")
    if not facts.experts:
        return made
    return made | {
        "moe_num_experts": facts.experts,
        "moe_k": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": facts.integer("expert_shared_count", 0),
        "moe_layer_start_index": facts.integer("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": facts.integer("interleave_moe_layer_step"),
    }


def hunyuan(facts: ModelFacts, tensors: Tensors) -> Fields:
    """Return the facts of Hunyuan V1. The RoPE base in the file includes the factor alpha.

    Raises ConfigError.
    """
    made = biases(tensors, attention_bias="attn_q")
    if not facts.experts:
        return made
    return made | {
        "num_experts": facts.experts,
        "moe_topk": facts.integer("expert_used_count"),
        "num_shared_expert": facts.integer("expert_shared_count", 1),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
    }


def minimax_m2(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of MiniMax M2. Raises ConfigError."""
    need_scores(facts, SIGMOID)
    return {
        "intermediate_size": facts.integer("expert_feed_forward_length"),
        "num_local_experts": facts.experts,
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "rotary_dim": facts.integer("rope.dimension_count"),
        "scoring_func": "sigmoid",
    }


def seed_oss(_: ModelFacts, tensors: Tensors) -> Fields:
    """Return the biases of Seed-OSS."""
    return biases(tensors, attention_bias="attn_q", attention_out_bias="attn_output", mlp_bias="ffn_gate")


def mistral3(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of Mistral Small 3 and Ministral 3: no window. Raises ConfigError."""
    if facts.yarn and facts.family != "ministral3":
        raise ConfigError("GGUF: mistral3 with yarn needs attention.temperature_scale", param="--model")
    return {"sliding_window": None}


def cohere2(facts: ModelFacts, _: Tensors) -> Fields:
    """Return the facts of Command R7B and Command A. Raises ConfigError."""
    return windows(facts, 4) | {"logit_scale": facts.number("logit_scale")}


def need_scores(facts: ModelFacts, wanted: int) -> None:
    """Raise ConfigError unless the router's scoring function is ``wanted``."""
    if facts.integer("expert_gating_func", wanted) != wanted:
        raise ConfigError(
            f"the GGUF file's {facts.architecture}.expert_gating_func must be {wanted}", param="--model"
        )


def _dense_size(tensors: Tensors) -> Fields:
    """Return the size of the dense feed-forward from the tensor: the key of Granite 4 files is wrong."""
    gate = tensors.get("blk.0.ffn_gate.weight")
    return {} if gate is None else {"intermediate_size": gate.shape[0]}


def _numbers(stored: StoredTensor) -> list[float]:
    """Return the values of an F32 tensor, rounded to 7 digits."""
    return [float(f"{float(value):.7g}") for value in stored.data]
