"""Falcon-H1: published weight names."""

from __future__ import annotations

import re

from weft.config.spec import ModelSpec
from weft.models.mixer_weights import add_decoder, add_grouped_attention, add_mamba
from weft.models.weights import WeightMap, add_gated_mlp


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    assert spec.mamba is not None
    result = WeightMap(ignored=[re.compile(r"\.(inv_freq|mup_vector)$")])
    add_decoder(result, spec, "model.embed_tokens", "model.final_layernorm")
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        result.add_norm(spec, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
        result.add_norm(spec, f"{theirs}.pre_ff_layernorm", f"{ours}.feed_forward_norm")
        add_grouped_attention(result, spec, f"{theirs}.self_attn", f"{ours}.attention")
        add_mamba(result, spec.mamba, f"{theirs}.mamba", f"{ours}.mamba")
        add_gated_mlp(result, spec, f"{theirs}.feed_forward", f"{ours}.feed_forward")
    return result
