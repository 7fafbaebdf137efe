"""Jamba: published weight names."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.mixer_weights import add_decoder, add_mamba_or_attention
from weft.models.weights import WeightMap, add_experts, add_gated_mlp


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = WeightMap()
    add_decoder(result, spec, "model.embed_tokens", "model.final_layernorm")
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        result.add_norm(spec, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
        result.add_norm(spec, f"{theirs}.pre_ff_layernorm", f"{ours}.feed_forward_norm")
        add_mamba_or_attention(result, spec, layer, theirs, ours)
        theirs, ours = f"{theirs}.feed_forward", f"{ours}.feed_forward"
        if spec.moe is not None and layer in spec.moe.layers:
            add_experts(result, spec, theirs, ours)
            placed = result.placements.pop(f"{theirs}.gate.weight")
            result.add(f"{theirs}.router.weight", placed.parameter)
        else:
            add_gated_mlp(result, spec, theirs, ours)
    return result
