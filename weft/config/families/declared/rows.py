"""The table of declared architectures.

Sources are the papers and model cards of the families, and the configuration classes of transformers.
"""

from __future__ import annotations

from typing import Any

from weft.config.families.common import window_layers
from weft.config.families.declared.class_defaults import class_defaults
from weft.config.families.declared.experts import (
    ernie_experts,
    experts_by_step,
    gemma4_experts,
    grouped_sigmoid,
    hunyuan_experts,
    llama4_experts,
    qwen2_experts,
    sigmoid_experts,
    softmax_experts,
    typed_sigmoid,
)
from weft.config.families.declared.hybrids import hybrid_layers, rope_or_none, with_delta_nets
from weft.config.families.declared.readers import (
    cwm_windows,
    full_attention_types,
    full_layers,
    gemma2_scales,
    gemma4_traits,
    gemma4_windows,
    gemma_embedding,
    gemma_scales,
    latent,
    llama4_traits,
    logit_scale,
    ministral_windows,
    multipliers,
    one_window,
    periodic_windows,
    query_temperature,
    switched_window,
    switched_windows,
    typed_windows,
    window_everywhere,
    with_head_bias,
    within_one_chunk,
)
from weft.config.families.declared.ropes import (
    alpha_rope,
    apertus_rope,
    cwm_rope,
    gemma4_ropes,
    ministral_rope,
    phi_rope,
    rope_by_list,
    rope_in_windows,
    rope_of_latent,
    rope_of_size,
    ropes_by_type,
)
from weft.config.families.declared.row import Row, field
from weft.config.families.declared.sections import QWEN2_5_VL, QWEN2_VL
from weft.config.parts.traits import NormSpec

_HUNYUAN_ONLY: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "use_cla": (False,),
    "use_mla": (False,),
    "use_rotary_pos_emb": (True,),
    "position_embedding_xdrope": (False,),
    "norm_type": ("rms",),
    "mlp_bias": (False,),
    "norm_topk_prob": (True,),
    "group_limited_greedy": (False,),
    "moe_layer_num_skipped": (0,),
    "add_classification_head": (False,),
    "moe_drop_tokens": (False,),
}
#: Files of Hunyuan have fields of towers, of latent attention and of training.
_HUNYUAN_UNUSED = (
    r"(anyres|vit|im|image|text|video|mask|pool|skip|kv_lora|q_lora|qk|v_head|class|org)_?\w*",
    r"attention_head_dim|cla_share_factor|dense_list|enable_lm_head_fp32|num_media_embeds|pad_id|xdrope_section",
    r"capacity_factor|moe_random_routing_dropped_token|n_group|topk_group|routed_scaling_factor|use_mixed_mlp_moe|eod_token_id",
)
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_LLAMA = Row(
    stated=_SIZES,
    config="LlamaConfig",
    qkv_bias=field("attention_bias"),
    o_bias=field("attention_bias"),
    mlp_bias=field("mlp_bias"),
    windows=full_layers,
    unused=("sliding_window", "use_sliding_window", "max_window_layers"),
)

ROWS: dict[str, Row] = {
    # Llama 2 and 3.x: arXiv 2307.09288, 2407.21783.
    "LlamaForCausalLM": _LLAMA,
    # Mistral and Mixtral: arXiv 2310.06825, 2401.04088.
    "MistralForCausalLM": Row(config="MistralConfig", stated=_SIZES, windows=window_everywhere),
    "MixtralForCausalLM": Row(
        config="MixtralConfig",
        stated=_SIZES,
        windows=window_everywhere,
        experts=softmax_experts(inner="intermediate_size"),
    ),
    # Qwen2 and Qwen2.5: arXiv 2407.10671. Qwen3: arXiv 2505.09388.
    "Qwen2ForCausalLM": Row(
        config="Qwen2Config",
        stated=_SIZES,
        qkv_bias=True,
        windows=window_layers,
        change=(within_one_chunk,),
        only={"attention_bias": (True, False), "qkv_bias": (True,)},
    ),
    "Qwen3ForCausalLM": Row(
        config="Qwen3Config",
        stated=_SIZES,
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        windows=window_layers,
    ),
    "Qwen3MoeForCausalLM": Row(
        config="Qwen3MoeConfig",
        stated=_SIZES,
        only={"use_qk_norm": (True,)},
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        windows=switched_window,
        experts=experts_by_step,
    ),
    # GLM-4.5, 4.6, 4.7: arXiv 2508.06471.
    "Glm4MoeForCausalLM": Row(
        config="Glm4MoeConfig",
        qkv_bias=field("attention_bias"),
        qk_norm=field("use_qk_norm"),
        partial=0.5,
        experts=grouped_sigmoid,
        modules=True,
    ),
    "SolarOpenForCausalLM": Row(
        config="SolarOpenConfig", qkv_bias=field("attention_bias"), experts=grouped_sigmoid
    ),
    # dots.llm1: arXiv 2506.05767.
    "Dots1ForCausalLM": Row(
        config="Dots1Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        windows=typed_windows,
        experts=grouped_sigmoid,
    ),
    "SeedOssForCausalLM": Row(
        config="SeedOssConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_out_bias"),
        mlp_bias=field("mlp_bias"),
    ),
    # Granite 3 and 4, dense and with experts.
    "GraniteForCausalLM": Row(
        config="GraniteConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        mlp_bias=field("mlp_bias"),
        change=(multipliers,),
    ),
    "GraniteMoeForCausalLM": Row(
        config="GraniteMoeConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        experts=softmax_experts(inner="intermediate_size"),
        change=(multipliers,),
    ),
    "GraniteMoeSharedForCausalLM": Row(
        config="GraniteMoeSharedConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        experts=softmax_experts(inner="intermediate_size", shared="shared_intermediate_size"),
        change=(multipliers,),
    ),
    # OLMo 2 and 3: arXiv 2501.00656, 2512.13961.
    "Olmo2ForCausalLM": Row(
        config="Olmo2Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        norm_over="all",
        norms=NormSpec(place="post"),
    ),
    "Olmo3ForCausalLM": Row(
        config="Olmo3Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        norm_over="all",
        norms=NormSpec(place="post"),
        windows=periodic_windows(4),
        ropes=ropes_by_type(),
    ),
    # Gated delta nets in most layers.
    "OlmoHybridForCausalLM": Row(
        config="OlmoHybridConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        norm_over="all",
        norms=NormSpec(place="post"),
        windows=hybrid_layers,
        ropes=rope_or_none,
        only={"linear_use_gate": (True, None)},  # in files of before the class of transformers
        unused=(r"linear_(a_log|dt)_\w+",),
        change=(with_delta_nets,),
    ),
    # EXAONE 4: arXiv 2507.11407.
    "Exaone4ForCausalLM": Row(
        config="Exaone4Config",
        qk_norm=True,
        norms=NormSpec(place="post"),
        windows=periodic_windows(4, field="sliding_window_pattern"),
        ropes=rope_in_windows,
    ),
    # MiniMax M2.
    "MiniMaxM2ForCausalLM": Row(
        config="MiniMaxM2Config",
        qk_norm=True,
        norm_over="all",
        experts=sigmoid_experts,
        ropes=rope_of_size("rotary_dim"),
        change=(full_attention_types,),
        only={
            "scoring_func": ("sigmoid",),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
        },
        # Files of October 2025 have fields of MiniMax-M1.
        unused=(
            "use_mtp|num_mtp_modules|mtp_transformer_layers|mlp_intermediate_size|shared_moe_mode",
            r"layernorm_\w+_beta|max_model_len",
        ),
    ),
    # Hunyuan V1.
    "HunYuanDenseV1ForCausalLM": Row(
        config="HunYuanDenseV1Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        norm_over="behind",
        ropes=alpha_rope,
        only=_HUNYUAN_ONLY,
        unused=(*_HUNYUAN_UNUSED, r"num_(experts|shared_experts?)", r"moe_(topk|intermediate_size)"),
    ),
    "HunYuanMoEV1ForCausalLM": Row(
        config="HunYuanMoEV1Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        norm_over="behind",
        ropes=alpha_rope,
        experts=hunyuan_experts,
        only=_HUNYUAN_ONLY,
        unused=_HUNYUAN_UNUSED,
    ),
    # Gemma 3: arXiv 2503.19786.
    "Gemma3ForCausalLM": Row(
        config="Gemma3TextConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        centred_norms=True,
        norms=NormSpec(place="both"),
        windows=periodic_windows(6, field="sliding_window_pattern"),
        ropes=ropes_by_type("rope_local_base_freq"),
        renamed={"hidden_activation": "hidden_act"},
        change=(gemma_scales,),
    ),
    # Gemma 2: arXiv 2408.00118.
    "Gemma2ForCausalLM": Row(
        config="Gemma2Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        centred_norms=True,
        norms=NormSpec(place="both"),
        windows=periodic_windows(2),
        renamed={"hidden_activation": "hidden_act"},
        change=(gemma2_scales,),
    ),
    # VaultGemma: arXiv 2510.15001.
    "VaultGemmaForCausalLM": Row(
        config="VaultGemmaConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        centred_norms=True,
        windows=periodic_windows(2),
        renamed={"hidden_activation": "hidden_act"},
        change=(gemma2_scales,),
    ),
    # Gemma 4: dense, with layer inputs, and with experts.
    "Gemma4ForCausalLM": Row(
        config="Gemma4TextConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        norms=NormSpec(place="both"),
        windows=gemma4_windows,
        ropes=gemma4_ropes,
        renamed={"hidden_activation": "hidden_act"},
        experts=gemma4_experts,
        change=(gemma4_traits,),
    ),
    # Gemma 1: arXiv 2403.08295.
    "GemmaForCausalLM": Row(
        config="GemmaConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        centred_norms=True,
        change=(gemma_embedding,),
        only={"hidden_activation": (None, "gelu_pytorch_tanh")},
    ),
    # Qwen1.5-MoE and Qwen2-57B-A14B: arXiv 2407.10671.
    "Qwen2MoeForCausalLM": Row(
        config="Qwen2MoeConfig",
        qkv_bias=field("qkv_bias"),
        windows=switched_windows,
        experts=qwen2_experts,
        unused=("max_window_layers", "sliding_window"),
    ),
    # OLMoE: arXiv 2409.02060.
    "OlmoeForCausalLM": Row(
        config="OlmoeConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        norm_over="all",
        experts=softmax_experts(
            count="num_experts", inner="intermediate_size", renormalized="norm_topk_prob"
        ),
    ),
    # K-EXAONE.
    "ExaoneMoeForCausalLM": Row(
        config="ExaoneMoeConfig",
        qk_norm=True,
        windows=periodic_windows(4, field="sliding_window_pattern"),
        ropes=rope_in_windows,
        renamed={
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "first_last_k_dense_replace": "first_k_dense_replace",
        },
        experts=typed_sigmoid,
        unused=("num_nextn_predict_layers",),
    ),
    # GLM-4-9B of June 2024.
    "GlmForCausalLM": Row(
        config="GlmConfig", qkv_bias=field("attention_bias"), partial=0.5, interleaved=True
    ),
    # Code World Model: arXiv 2510.02387.
    "CwmForCausalLM": Row(
        config="CwmConfig", mlp_bias=field("mlp_bias"), windows=cwm_windows, ropes=cwm_rope
    ),
    # Ministral of 2024, with windows in some layers.
    "MinistralForCausalLM": Row(config="MinistralConfig", windows=ministral_windows),
    # Llama 4, with attention in chunks.
    "Llama4ForCausalLM": Row(
        config="Llama4TextConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=field("use_qk_norm"),
        norm_over="unit",
        interleaved=True,
        ropes=rope_by_list,
        experts=llama4_experts,
        change=(llama4_traits,),
        only={"for_llm_compressor": (False,)},
    ),
    "SmolLM3ForCausalLM": Row(
        config="SmolLM3Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        mlp_bias=field("mlp_bias"),
        windows=switched_windows,
        ropes=rope_by_list,
        unused=("max_window_layers",),
    ),
    "Ministral3ForCausalLM": Row(
        config="Ministral3Config", windows=one_window, ropes=ministral_rope, change=(query_temperature,)
    ),
    # Ernie 4.5.
    "Ernie4_5ForCausalLM": Row(
        config="Ernie4_5Config",
        qkv_bias=field("use_bias"),
        o_bias=field("use_bias"),
        mlp_bias=field("use_bias"),
        interleaved=True,
        only={"compression_ratio": (1.0,)},
    ),
    "Ernie4_5_MoeForCausalLM": Row(
        config="Ernie4_5_MoeConfig",
        qkv_bias=field("use_bias"),
        o_bias=field("use_bias"),
        mlp_bias=field("use_bias"),
        interleaved=True,
        experts=ernie_experts,
        only={"use_bias": (False,), "moe_use_aux_free": (True,), "compression_ratio": (1.0,)},
        unused=(
            "moe_capacity",
            "moe_gate",
            "moe_gate_act",
            "moe_multimodal_dispatch_use_allgather",
            "num_nextn_predict_layers",
        ),
    ),
    # GLM-4-0414.
    "Glm4ForCausalLM": Row(
        config="Glm4Config",
        qkv_bias=field("attention_bias"),
        partial=0.5,
        interleaved=True,
        norms=NormSpec(place="both"),
    ),
    # GLM-4.7-Flash.
    "Glm4MoeLiteForCausalLM": Row(
        config="Glm4MoeLiteConfig",
        o_bias=field("attention_bias"),
        experts=typed_sigmoid,
        ropes=rope_of_latent,
        change=(latent,),
        modules=True,
        unused=("qk_head_dim",),
    ),
    # Command R and Aya: the model cards of CohereLabs.
    "CohereForCausalLM": Row(
        config="CohereConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        interleaved=True,
        norms=NormSpec(place="parallel", kind="layer"),
        renamed={"layer_norm_eps": "rms_norm_eps"},
        change=(logit_scale,),
        only={"use_qk_norm": (False,)},
    ),
    # Command R7B and Command A: arXiv 2504.00698.
    "Cohere2ForCausalLM": Row(
        config="Cohere2Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        interleaved=True,
        norms=NormSpec(place="parallel", kind="layer"),
        windows=periodic_windows(4, field="sliding_window_pattern"),
        ropes=rope_in_windows,
        renamed={"layer_norm_eps": "rms_norm_eps"},
        change=(logit_scale,),
        only={"use_qk_norm": (False,), "use_parallel_block": (True,), "use_gated_activation": (True,)},
        unused=(
            "position_embedding_type",
            "rotary_pct",
            "order_of_interleaved_layers",
            "use_embedding_sharing",
            "use_parallel_embedding",
            "layer_switch",
        ),
    ),
    # Nemotron 4 and Minitron: arXiv 2402.16819.
    "NemotronForCausalLM": Row(
        config="NemotronConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        mlp_bias=field("mlp_bias"),
        partial=0.5,
        centred_norms=True,
        norms=NormSpec(kind="layer", bias=True),
        gated=False,
        renamed={"norm_eps": "rms_norm_eps", "rope_percent": "partial_rotary_factor"},
        unused=("kv_channels",),
    ),
    "ArceeForCausalLM": Row(
        config="ArceeConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        mlp_bias=field("mlp_bias"),
        gated=False,
    ),
    # StarCoder 2: arXiv 2402.19173.
    "Starcoder2ForCausalLM": Row(
        config="Starcoder2Config",
        qkv_bias=field("use_bias"),
        o_bias=field("use_bias"),
        mlp_bias=field("use_bias"),
        norms=NormSpec(kind="layer", bias=True),
        gated=False,
        windows=one_window,
        renamed={"norm_epsilon": "rms_norm_eps"},
        only={"norm_type": ("layer_norm",), "mlp_type": ("default",), "scale_attn_weights": (True,)},
        unused=(r"activation_function|(scale_)?attention_softmax_in_fp32|layer_norm_epsilon",),
    ),
    # Phi-1.5 and Phi-2.
    "PhiForCausalLM": Row(
        config="PhiConfig",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        partial=0.5,
        norms=NormSpec(place="parallel", kind="layer", bias=True),
        gated=False,
        renamed={"layer_norm_eps": "rms_norm_eps"},
        change=(with_head_bias,),
    ),
    # Apertus: arXiv 2509.14233.
    "ApertusForCausalLM": Row(
        config="ApertusConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        gated=False,
        ropes=apertus_rope,
        only={"qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)},
    ),
    # Phi-3, Phi-4 and Phi-4-mini: arXiv 2404.14219, 2412.08905.
    "Phi3ForCausalLM": Row(
        config="Phi3Config",
        partial=1.0,
        windows=one_window,
        ropes=phi_rope,
        only={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "lm_head_bias": (False,),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
        },
    ),
}
"""Architecture in config.json -> row."""

TEXT_ROWS: dict[str, Row] = {
    "llama": ROWS["LlamaForCausalLM"],
    "qwen2": ROWS["Qwen2ForCausalLM"],
    "qwen3": ROWS["Qwen3ForCausalLM"],
    "qwen3_moe": ROWS["Qwen3MoeForCausalLM"],
    "mistral": ROWS["MistralForCausalLM"],
    "gemma3_text": ROWS["Gemma3ForCausalLM"],
    "llama4_text": ROWS["Llama4ForCausalLM"],
    "gemma4_text": ROWS["Gemma4ForCausalLM"],
    "ministral3": ROWS["Ministral3ForCausalLM"],
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_5_VL,
}
"""``model_type`` of a text model below ``text_config`` -> row."""

WRAPPERS: dict[str, tuple[str, ...]] = {
    # Mistral Small 3.1 and later, Ministral 3.
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Gemma4ForConditionalGeneration": ("gemma4_text",),
    "Llama4ForConditionalGeneration": ("llama4_text",),
    # InternVL3 and InternVL3.5, in the form of transformers.
    "InternVLForConditionalGeneration": ("qwen2", "qwen3", "qwen3_moe", "llama"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text",),
}
"""Architecture with a tower -> types of its text model."""

TIED = ("InternVLForConditionalGeneration",)
"""Architectures whose configuration class ties the output head.

Without the field in the files, the head is tied unless the checkpoint has the tensor of a head.
"""

MODEL_TYPES: dict[str, str] = {
    class_defaults()[row.config].model_type: name
    for name, row in ROWS.items()
    if row.config in class_defaults()
}
"""``model_type`` in config.json -> architecture."""
