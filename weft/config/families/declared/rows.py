"""The table of declared architectures.

Sources are the papers and model cards of the families, and the configuration classes of transformers.
"""

from __future__ import annotations

from weft.config.families.declared.class_defaults import class_defaults
from weft.config.families.declared.readers import grouped_sigmoid, one_window, typed_windows
from weft.config.families.declared.row import Row, field

ROWS: dict[str, Row] = {
    # GLM-4.5, 4.6, 4.7: arXiv 2508.06471.
    "Glm4MoeForCausalLM": Row(
        config="Glm4MoeConfig",
        qkv_bias=field("attention_bias"),
        qk_norm=field("use_qk_norm"),
        partial=0.5,
        experts=grouped_sigmoid(),
        modules=True,
    ),
    "SolarOpenForCausalLM": Row(
        config="SolarOpenConfig", qkv_bias=field("attention_bias"), experts=grouped_sigmoid()
    ),
    # dots.llm1: arXiv 2506.05767.
    "Dots1ForCausalLM": Row(
        config="Dots1Config",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_bias"),
        qk_norm=True,
        windows=typed_windows,
        experts=grouped_sigmoid(),
    ),
    "SeedOssForCausalLM": Row(
        config="SeedOssConfig",
        qkv_bias=field("attention_bias"),
        o_bias=field("attention_out_bias"),
        mlp_bias=field("mlp_bias"),
    ),
    # Phi-3, Phi-4 and Phi-4-mini: arXiv 2404.14219, 2412.08905.
    "Phi3ForCausalLM": Row(config="Phi3Config", partial=1.0, windows=one_window),
}
"""Architecture in config.json -> row."""

MODEL_TYPES: dict[str, str] = {
    row.model_type or class_defaults()[row.config].model_type: name
    for name, row in ROWS.items()
    if row.model_type or row.config in class_defaults()
}
"""``model_type`` in config.json -> architecture."""
