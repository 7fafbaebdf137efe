"""Tiny random checkpoints of the causal classes of transformers, for the generic backend."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.config.families.generic.probing import CAUSAL

VOCABULARY = 131
_MOST = 8_000_000
"""Largest number of parameters of a tiny model."""
FULL, SLIDING = "full_attention", "sliding_attention"

#: Fields of every tiny configuration. A field applies where the configuration class has the field.
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 48,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 7,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = ("AXK1", "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Youtu")
#: Class name without ``ForCausalLM`` -> changes of the configuration.
CHANGES: dict[str, dict[str, Any]] = {
    "Gemma3": {"layer_types": [SLIDING, FULL, SLIDING]},
    "Gemma4": {
        "layer_types": [SLIDING, SLIDING, FULL],
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
    },
    "Llama4": {"intermediate_size_mlp": 80, "num_experts_per_tok": 1, "attention_chunk_size": 512},
    "GraniteMoeHybrid": {
        "layer_types": ["attention"] * 3,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 8,
    },
    "MiMoV2Flash": {"layer_types": [FULL, SLIDING, SLIDING], "v_head_dim": 16},
    "Olmo3": {"layer_types": [SLIDING, SLIDING, FULL]},
    "Phimoe": {"num_local_experts": 4},
    **{name: {"num_key_value_heads": 4} for name in _LATENT},
    "Bamba": {"mamba_n_heads": 8},
    "Emu3": {"pad_token_id": 0},
    "ModernBertDecoder": {"pad_token_id": 0},
    "Dots3Note": {"num_key_value_heads": 4},
    "Gemma3n": {"layer_types": [SLIDING, SLIDING, FULL], "num_kv_shared_layers": 0},
    "Lfm2": {"layer_types": ["conv", FULL, "conv"]},
    "Lfm2Moe": {"layer_types": ["conv", FULL, "conv"]},
    "Zaya": {"num_experts_per_tok": 1},
    "StableLm": {"num_attention_heads": 2},
    "Helium": {"head_dim": 12},
    "GPTNeoXJapanese": {"num_attention_heads": 2},
    "GPTJ": {"rotary_dim": 8, "n_embd": 64},
    "CodeGen": {"rotary_dim": 8, "n_embd": 64},
    "GPTNeo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 7},
    **{
        name: {"pad_token_id": 0}
        for name in (
            "Camembert",
            "Data2VecText",
            "Roberta",
            "RobertaPreLayerNorm",
            "XLMRoberta",
            "XLMRobertaXL",
            "Xmod",
        )
    },
    "Blenderbot": {"d_model": 64},
    "Mamba2": {"num_heads": 6, "n_groups": 1, "state_size": 8},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "Mamba": {"state_size": 8},
    "FalconMamba": {"state_size": 8},
    "Zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "layer_types": ["mamba", "hybrid", "mamba"],
    },
    "Mpt": {"max_seq_len": 512},
    "Cohere2": {"layer_types": [SLIDING, SLIDING, FULL]},
}


def classes() -> list[str]:
    """Return the causal classes of the installed transformers, without ``ForCausalLM``.

    Older classes have another ending, and a whole name: ``GPT2LMHeadModel``.
    """
    names = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if name.endswith(CAUSAL)}
    return sorted(name.removesuffix("ForCausalLM") for name in names)


def full_name(name: str) -> str:
    """Return the architecture of an entry of ``classes``."""
    return name if name.endswith(CAUSAL) else f"{name}ForCausalLM"


def tiny_config(name: str, **more: Any) -> Any:
    """Return a tiny configuration for the class ``name`` of ``classes``."""
    cls = getattr(transformers, full_name(name)).config_class
    known = set(getattr(cls, "__dataclass_fields__", {})) | set(cls.attribute_map)
    fields = {key: value for key, value in _BASE.items() if key in known}
    config = cls(**{**fields, **CHANGES.get(name, {}), **more})
    config.architectures = [full_name(name)]
    return config


@torch.no_grad()
def tiny_model(name: str, seed: int = 0, **more: Any) -> Any:
    """Return a random model in float64, with loud weights. Every weight matters: norms are not 1."""
    config = tiny_config(name, **more)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device("meta"):
        size = sum(p.numel() for p in getattr(transformers, full_name(name))(config).parameters())
    if size > _MOST:
        raise ValueError(f"the configuration is not tiny: {size / 1e6:.0f} M parameters")
    model = getattr(transformers, full_name(name))(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        around = float(weight.flatten()[0]) if weight.dim() == 1 and "norm" in key else 0.0
        weight.normal_(around, 0.3 if weight.dim() == 1 else 0.25, generator=generator)
    for key, buffer in model.named_buffers():
        if key.endswith("correction_bias"):
            buffer.normal_(0.0, 0.25, generator=generator)
    return model


@torch.no_grad()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Return ``ids`` and ``count`` more greedy tokens of the reference, without a cache."""
    made = list(ids)
    for _ in range(count):
        logits = model(torch.tensor([made]), use_cache=False).logits[0, -1]
        made.append(int(logits.argmax()))
    return made
