"""Table of GGUF architectures: tensor names, tensor forms and a reader of config fields by architecture.

Published names follow Llama's spelling, which ``weft.models.declared.names`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from weft.gguf import more_facts, row_facts
from weft.gguf.container import StoredTensor
from weft.gguf.model_facts import ModelFacts
from weft.gguf.row_facts import Fields, Tensors

_OUTPUT_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""A norm before the feed-forward that the file names after attention."""
_POST_NORMS = {**_OUTPUT_NORM, "post_ffw_norm": "post_feedforward_layernorm"}
_BOTH_NORMS = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}


class GgufRow(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture. The defaults describe a file with unchanged weights and Llama's names."""

    read: Callable[[ModelFacts, Tensors], Fields]
    """Reader of the facts beyond sizes."""
    names: dict[str, str] = {}
    """Tensor of a layer -> published name within the layer, where the name differs from Llama's."""
    halves: bool = False
    """True if the rows of queries and keys need ``TensorForm.HALVES``, as for Llama."""
    centred: bool = False
    """True if the file adds 1 to the weights of norms."""
    partial: bool = False
    """True if partial RoPE is supported."""
    layer_norm: str = ""
    """Field of config.json for the epsilon of norms that subtract the mean; "" for RMS norms."""
    facts: tuple[str, ...] = ()
    """Tensors for facts of config.json, not weights."""
    own_rope: bool = False
    """True if ``read`` returns the RoPE fields and reads ``rope_freqs.weight``."""
    prefix: str = "model.layers"
    """Published name of the layers."""
    top: dict[str, str] = {}
    """Tensor outside the layers, without ending -> published name, in addition to Llama's."""
    bare: dict[str, str] = {}
    """Tensor of a layer, with ending -> published name, if the endings differ."""
    forms: dict[str, str] = {}
    """Tensor of a layer, with ending -> name of the ``TensorForm``, if not ``STORED``."""
    experts: tuple[str, ...] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    """Published names of the experts' block and of the matrices gate, up, down of an expert."""


_GRANITE = GgufRow(read=row_facts.granite, halves=True)
_OLMO = GgufRow(read=row_facts.olmo2, names=_POST_NORMS)
_ERNIE = GgufRow(read=row_facts.ernie)
_MISTRAL = GgufRow(read=row_facts.mistral3, halves=True)
_HUNYUAN = GgufRow(read=row_facts.hunyuan)
_LFM2 = GgufRow(
    read=row_facts.lfm2,
    names={
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
    },
    top={"token_embd_norm": "model.embedding_norm"},
    bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
    forms={"shortconv.conv.weight": "TAPS"},
    experts=("feed_forward.experts", "w1", "w3", "w2"),
)
_NEMOTRON_H = GgufRow(
    read=row_facts.nemotron_h,
    halves=True,  # the converter reorders rows, although the model has no RoPE
    prefix="backbone.layers",
    names={
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ssm_in": "mixer.in_proj",
        "ssm_out": "mixer.out_proj",
        "ssm_norm": "mixer.norm",
        "ssm_conv1d": "mixer.conv1d",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    top={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    bare={
        "ssm_a": "mixer.A_log",
        "ssm_d": "mixer.D",
        "ssm_dt.bias": "mixer.dt_bias",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    },
    forms={"ssm_conv1d.weight": "TAPS", "ssm_norm.weight": "FLAT", "ssm_a": "RATES", "ssm_d": "FLAT"},
    experts=("mixer.experts", "gate_proj", "up_proj", "down_proj"),
)

_KIMI_MOE = "block_sparse_moe"
_MAMBA2 = {
    "ssm_in": "mamba.in_proj",
    "ssm_out": "mamba.out_proj",
    "ssm_norm": "mamba.norm",
    "ssm_conv1d": "mamba.conv1d",
}
_MAMBA2_BARE = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
_MAMBA2_FORMS = {"ssm_conv1d.weight": "TAPS", "ssm_norm.weight": "FLAT", "ssm_a": "RATES", "ssm_d": "FLAT"}
_MAMBA1 = {
    "ssm_in": "mamba.in_proj",
    "ssm_out": "mamba.out_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
}
_MAMBA1_FORMS = {"ssm_conv1d.weight": "TAPS", "ssm_a": "LOGARITHMS"}

ROWS: dict[str, GgufRow] = {
    "gemma3": GgufRow(read=row_facts.gemma3, names=_BOTH_NORMS, centred=True),
    "gemma4": GgufRow(
        read=row_facts.gemma4,
        names={
            **_BOTH_NORMS,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        top={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        bare={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
        },
        own_rope=True,
    ),
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "glm4moe": GgufRow(read=row_facts.glm4moe, names=_OUTPUT_NORM, partial=True),
    "phi3": GgufRow(
        read=row_facts.phi3,
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial=True,
        facts=("rope_factors_long", "rope_factors_short"),
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoe-shared": _GRANITE,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "smollm3": GgufRow(read=row_facts.smollm3, halves=True),
    "exaone4": GgufRow(read=row_facts.exaone4, names=_POST_NORMS),
    "ernie4_5": _ERNIE,
    "ernie4_5-moe": _ERNIE,
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": _HUNYUAN,
    "minimax-m2": GgufRow(read=row_facts.minimax_m2, partial=True),
    "seed_oss": GgufRow(read=row_facts.seed_oss, names=_OUTPUT_NORM),
    "mistral3": _MISTRAL,
    "ministral3": _MISTRAL,
    "cohere2": GgufRow(read=row_facts.cohere2, layer_norm="layer_norm_eps"),
    "command-r": GgufRow(read=more_facts.command_r, layer_norm="layer_norm_eps"),
    "gemma": GgufRow(read=more_facts.gemma, centred=True),
    "glm4": GgufRow(
        read=more_facts.glm4,
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        partial=True,
    ),
    "qwen2moe": GgufRow(
        read=more_facts.qwen2moe,
        names={
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        bare={"ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight"},
        forms={"ffn_gate_inp_shexp.weight": "ROW"},
    ),
    "olmoe": GgufRow(read=more_facts.olmoe),
    "dots1": GgufRow(read=more_facts.dots1),
    "gemma2": GgufRow(read=more_facts.gemma2, names=_BOTH_NORMS, centred=True),
    "starcoder2": GgufRow(
        read=more_facts.starcoder2,
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        layer_norm="norm_epsilon",
    ),
    "llama4": GgufRow(read=more_facts.llama4),
    "falcon-h1": GgufRow(
        read=more_facts.falcon_h1,
        names={
            **_MAMBA2,
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        top={"output_norm": "model.final_layernorm"},
        bare={**_MAMBA2_BARE, "ffn_norm": "pre_ff_layernorm.weight"},
        forms=_MAMBA2_FORMS,
    ),
    "kimi-linear": GgufRow(
        read=more_facts.kimi_linear,
        names={
            **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
            **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
            **{
                f"ffn_{part}_shexp": f"{_KIMI_MOE}.shared_experts.{part}_proj"
                for part in ("gate", "up", "down")
            },
            "ssm_beta": "self_attn.b_proj",
            "ssm_norm": "self_attn.o_norm",
            "ffn_gate_inp": f"{_KIMI_MOE}.gate",
        },
        bare={
            "ssm_a": "self_attn.A_log",
            "ssm_dt.bias": "self_attn.dt_bias",
            "exp_probs_b.bias": f"{_KIMI_MOE}.gate.e_score_correction_bias",
        },
        forms={**{f"ssm_conv1d_{part}.weight": "TAPS" for part in "qkv"}, "ssm_a": "RATES"},
        experts=(f"{_KIMI_MOE}.experts", "w1", "w3", "w2"),
    ),
    "mamba2": GgufRow(
        read=more_facts.mamba2,
        prefix="backbone.layers",
        names={
            "attn_norm": "norm",
            **{name: published.replace("mamba.", "mixer.") for name, published in _MAMBA2.items()},
        },
        top={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
        bare={name: published.replace("mamba.", "mixer.") for name, published in _MAMBA2_BARE.items()},
        forms=_MAMBA2_FORMS,
    ),
    "mamba": GgufRow(
        read=more_facts.mamba,
        prefix="backbone.layers",
        names={
            "attn_norm": "norm",
            **{name: published.replace("mamba.", "mixer.") for name, published in _MAMBA1.items()},
        },
        top={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
        bare={"ssm_a": "mixer.A_log", "ssm_d": "mixer.D"},
        forms=_MAMBA1_FORMS,
    ),
    "jamba": GgufRow(
        read=more_facts.jamba,
        names={
            **_MAMBA1,
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
            "ffn_norm": "pre_ff_layernorm",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "ffn_gate_inp": "feed_forward.router",
        },
        top={"output_norm": "model.final_layernorm"},
        bare={"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"},
        forms=_MAMBA1_FORMS,
        experts=("feed_forward.experts", "gate_proj", "up_proj", "down_proj"),
    ),
    "granitehybrid": GgufRow(
        read=more_facts.granite_hybrid,
        halves=True,  # the converter reorders rows, although the model has no RoPE
        names={
            **_MAMBA2,
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_gate_shexp": "shared_mlp.gate_proj",
            "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_gate_inp": "block_sparse_moe.gate",
        },
        bare=_MAMBA2_BARE,
        forms=_MAMBA2_FORMS,
        experts=("block_sparse_moe.experts", "gate_proj", "up_proj", "down_proj"),
    ),
}
"""Key in ``FAMILIES`` -> row."""


def row_fields(row: GgufRow, facts: ModelFacts, tensors: dict[str, StoredTensor]) -> dict[str, Any]:
    """Return the fields of config.json by the row. Raises ConfigError for an unsupported model."""
    return row_facts.head_size(facts, partial=row.partial) | row.read(facts, tensors)
