"""A checkpoint's ``config.json`` from the metadata of a GGUF file.

Keys follow the GGUF specification (ggml-org/ggml, docs/gguf.md): ``general.*``, and the model's keys
with the architecture's name as prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from weft.common.errors import ConfigError
from weft.gguf.container import PACKED, WIDENED, StoredTensor
from weft.gguf.delta_heads import DeltaHeads
from weft.gguf.model_facts import FAMILIES, ModelFacts
from weft.gguf.row_facts import yarn_details
from weft.gguf.rows import ROWS, GgufRow, row_fields

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Constants of the frequency scaling of Llama 3.1."""
_LLAMA3_CONTEXT = 8192


def config_of(
    metadata: Mapping[str, Any], tensors: Sequence[StoredTensor], rope_factors: Sequence[float] | None
) -> dict[str, Any]:
    """Return the model's ``config.json``.

    ``rope_factors``: the file's ``rope_freqs.weight``, divisors of the frequencies. Raises ConfigError for an
    unsupported model.
    """
    facts = ModelFacts(metadata)
    family = facts.family
    name, model_type = FAMILIES[family]
    row = ROWS.get(family)
    stored = {tensor.name: tensor for tensor in tensors}
    made: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": facts.integer("embedding_length"),
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "intermediate_size": facts.inner_size or _expert_size(facts),
        **_norm_eps(facts, row),
        "max_position_embeddings": facts.integer("context_length"),
        "vocab_size": _vocabulary(tensors),
        "hidden_act": "silu",
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in stored,
        "dtype": "float32" if all(tensor.kind == "F32" for tensor in tensors) else "bfloat16",
    }
    # Facts of latent attention replace the head size. Rope scaling depends on the head size.
    if facts.architecture in ("deepseek2", "glm-dsa", "kimi-linear"):
        made |= _latent(facts)
        made |= _indexers(facts) if row is None else row.read(facts, stored)
    elif (heads := facts.delta) is not None:
        made |= _hybrid(facts, heads)
    elif row is not None:
        # The row may replace any field above.
        made |= row_fields(row, facts, stored)
    else:
        made["head_dim"] = _head_size(facts, made["hidden_size"])
    if row is not None and row.own_rope:
        rope_factors = None
        del made["rope_theta"]
    made |= _rope_scaling(facts, rope_factors, made.get("head_dim", 0), made.get("rope_theta", 0.0))
    if row is not None and facts.yarn:
        made["rope_scaling"] |= yarn_details(facts)
    if "rope_parameters" in made:  # one field describes the rotation, not two
        made["rope_parameters"] |= made.pop("rope_scaling", {})
    if family == "llama":
        made["attention_bias"] = "blk.0.attn_q.bias" in stored
        made["mlp_bias"] = "blk.0.ffn_gate.bias" in stored
    if facts.experts and row is None:
        made |= _experts(facts)
    if family == "gpt-oss":
        made["intermediate_size"] = _expert_size(facts)
        made["sliding_window"] = facts.integer("attention.sliding_window")
        if any(tensor.name.endswith("_exps.weight") and tensor.kind == "MXFP4" for tensor in tensors):
            made["quantization_config"] = {"quant_method": "mxfp4"}
    facts.refuse_unread()
    return _quantization(tensors, facts.delta) | made | _ends(metadata)


def _norm_eps(facts: ModelFacts, row: GgufRow | None) -> dict[str, float]:
    """Return the epsilon of the norms, in the field of the family. Raises ConfigError for a missing key."""
    if row is not None and row.layer_norm:
        return {row.layer_norm: facts.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon")}


def _quantization(tensors: Sequence[StoredTensor], heads: DeltaHeads | None) -> dict[str, Any]:
    """Return the average bits per element of the layers' matrices, for the memory plan.

    Types in ``PACKED`` count with their stored bytes or ``WIDENED``, other types with 16 bits. Empty if no
    matrix has a type in ``PACKED``. ``heads``: heads of delta nets.
    """
    # Only matrices of layers. Routers and other F32 tensors stay plain.
    matrices = [t for t in tensors if t.name.startswith("blk.") and len(t.shape) > 1 and t.kind != "F32"]
    elements = sum(math.prod(tensor.shape) for tensor in matrices)
    if not any(tensor.kind in PACKED for tensor in matrices):
        return {}
    bits = sum(_bits(tensor, heads) for tensor in matrices)
    return {"quantization_config": {"quant_method": "gguf", "bits": round(bits / elements, 2)}}


def _bits(tensor: StoredTensor, heads: DeltaHeads | None) -> float:
    """Return the bits of a matrix in memory."""
    # A quantized block has more columns than a value head: columns cannot be reordered without dequantizing.
    reordered = heads is not None and heads.reorders and tensor.name.endswith(".ssm_out.weight")
    if tensor.kind not in PACKED or reordered:
        return 16.0 * math.prod(tensor.shape)
    if tensor.kind in WIDENED:
        return WIDENED[tensor.kind] * math.prod(tensor.shape)
    return 8.0 * math.prod(tensor.dims)


def _head_size(facts: ModelFacts, hidden: int) -> int:
    """Return the size of a head. Raises ConfigError for values of another size, and for partial RoPE."""
    size = facts.integer("attention.key_length", hidden // max(facts.heads, 1))
    if facts.integer("attention.value_length", size) != size:
        raise ConfigError("GGUF: keys and values of different sizes are not supported here", param="--model")
    if facts.integer("rope.dimension_count", size) != size:
        raise ConfigError("GGUF: heads with partial RoPE are not supported here", param="--model")
    return size


def _latent(facts: ModelFacts) -> dict[str, Any]:
    """Return the sizes of latent attention.

    Older files have key and value sizes under the plain names. Raises ConfigError for a missing size.
    """
    rotated = facts.integer("rope.dimension_count")
    keys = facts.integer("attention.key_length_mla", facts.integer("attention.key_length"))
    return {
        "num_key_value_heads": facts.heads,
        "q_lora_rank": facts.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": facts.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": facts.integer("attention.value_length_mla", facts.integer("attention.value_length")),
        "rope_interleave": True,
    }


def _indexers(facts: ModelFacts) -> dict[str, Any]:
    """Return the facts of the indexers, {} for attention without. Raises ConfigError for a missing size."""
    if facts.architecture != "glm-dsa":
        return {}
    made: dict[str, Any] = {
        "index_n_heads": facts.integer("attention.indexer.head_count"),
        "index_head_dim": facts.integer("attention.indexer.key_length"),
        "index_topk": facts.integer("attention.indexer.top_k"),
    }
    if own := facts.numbers("attention.indexer.types"):
        made["indexer_types"] = ["full" if each else "shared" for each in own]
    return made


def _hybrid(facts: ModelFacts, heads: DeltaHeads) -> dict[str, Any]:
    """Return the facts of a model with delta nets and gated attention. Raises ConfigError."""
    size = facts.integer("attention.key_length")
    made: dict[str, Any] = {
        "head_dim": size,
        "partial_rotary_factor": facts.integer("rope.dimension_count", size) / size,
        "linear_num_key_heads": heads.k_heads,
        "linear_num_value_heads": heads.v_heads,
        "linear_key_head_dim": facts.integer("ssm.state_size"),
        "linear_value_head_dim": heads.values // heads.v_heads,
        "linear_conv_kernel_dim": facts.integer("ssm.conv_kernel"),
        "full_attention_interval": facts.integer("full_attention_interval", 4),
    }
    if recurrent := facts.numbers("attention.recurrent_layers"):
        made["layer_types"] = ["linear_attention" if each else "full_attention" for each in recurrent]
    if sections := facts.numbers("rope.dimension_sections"):
        made["rope_parameters"] = {"rope_type": "default", "mrope_section": sections[:3]}
        made["rope_parameters"]["rope_theta"] = facts.number("rope.freq_base", 10000.0)
        made["rope_parameters"]["partial_rotary_factor"] = made["partial_rotary_factor"]
        made["rope_parameters"]["mrope_interleaved"] = True
    return made


def _experts(facts: ModelFacts) -> dict[str, Any]:
    """Return the routing facts of the layers. Raises ConfigError for a missing fact."""
    made: dict[str, Any] = {"num_experts_per_tok": facts.integer("expert_used_count")}
    match facts.family:
        case "mixtral" | "gpt-oss":
            return made | {"num_local_experts": facts.experts}
        case "qwen3moe" | "qwen3vlmoe":
            made |= {"num_experts": facts.experts, "norm_topk_prob": True}
            made |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
            return made | {"moe_intermediate_size": _expert_size(facts)}
        case "qwen3next" | "qwen35moe":
            made |= {"num_experts": facts.experts, "norm_topk_prob": True}
            made |= {"shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length", 0)}
            return made | {"moe_intermediate_size": _expert_size(facts)}
    groups = facts.integer("expert_group_count", 1) or 1
    made |= {
        "n_routed_experts": facts.experts,
        "n_shared_experts": facts.integer("expert_shared_count", 0),
        "moe_intermediate_size": _expert_size(facts),
        "first_k_dense_replace": facts.integer("leading_dense_block_count", 0),
        "moe_layer_freq": 1,
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.flag("expert_weights_norm", facts.family == "deepseek3"),
        "n_group": groups,
        "topk_group": facts.integer("expert_group_used_count", groups) or groups,
    }
    if facts.family == "deepseek2" and groups > 1:
        made["topk_method"] = "group_limited_greedy"
    return made


def _expert_size(facts: ModelFacts) -> int:
    return facts.integer("expert_feed_forward_length", facts.integer("feed_forward_length", 0))


def _vocabulary(tensors: Sequence[StoredTensor]) -> int:
    """Return the number of token ids. Raises ConfigError for a file without token embeddings."""
    for tensor in tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[0]
    raise ConfigError(
        "the GGUF file has no token_embd.weight, so the file is not a language model", param="--model"
    )


def _ends(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bos id and the eos ids. The end of a turn is one of the eos ids."""
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    made: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(e for e in ends if isinstance(e, int)))}
    if isinstance(begin := metadata.get("tokenizer.ggml.bos_token_id"), int):
        made["bos_token_id"] = begin
    return made


def _rope_scaling(
    facts: ModelFacts, factors: Sequence[float] | None, size: int, theta: float
) -> dict[str, Any]:
    """Return the field ``rope_scaling``, or {} without scaling. Raises ConfigError for unsupported scaling.

    ``factors``: divisors of the frequencies, or None. ``size``: dims of a head. ``theta``: base of the
    rotation.
    """
    kind = facts.metadata.get(f"{facts.architecture}.rope.scaling.type")
    # Older files have the factor without the kind, or under an older name. llama.cpp then scales linearly.
    factor = "rope.scaling.factor" if facts.has("rope.scaling.factor") else "rope.scale_linear"
    if kind is None:
        kind = "linear" if facts.has(factor) and facts.number(factor) != 1.0 else "none"
    if factors is not None:
        if kind not in ("none", "linear", "llama3") or not _is_llama3(factors, size, theta):
            raise ConfigError(
                "the GGUF file's rope_freqs.weight differs from Llama 3.1's, and other values are not "
                "supported",
                param="--model",
            )
        scaling = {"rope_type": "llama3", "factor": round(max(factors), 4), **_LLAMA3}
        return {"rope_scaling": scaling | {"original_max_position_embeddings": _LLAMA3_CONTEXT}}
    if kind in ("none", ""):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": facts.number(factor)}}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": facts.number("rope.scaling.factor")}
        if facts.architecture == "gpt-oss":
            scaling["truncate"] = False
        # The file has a tenth of the published value.
        if facts.has("rope.scaling.yarn_log_multiplier"):
            scale = round(10 * facts.number("rope.scaling.yarn_log_multiplier"), 6)
            scaling |= {"mscale": scale, "mscale_all_dim": scale}
        if facts.has("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = facts.integer(
                "rope.scaling.original_context_length"
            )
        return {"rope_scaling": scaling}
    raise ConfigError(
        f"GGUF rope scaling {kind!r} is not supported; there are: linear, yarn", param="--model"
    )


def _is_llama3(factors: Sequence[float], size: int, theta: float) -> bool:
    """Return True if ``factors`` equal Llama 3.1's scaling with the largest factor as parameter."""
    if len(factors) != size // 2:
        return False
    factor = max(factors)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    for pair, found in enumerate(factors):
        length = 2 * math.pi * theta ** (2 * pair / size)
        smooth = (_LLAMA3_CONTEXT / length - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        if abs(1.0 / ((1 - smooth) / factor + smooth) - found) > 1e-3 * found:
            return False
    return True
