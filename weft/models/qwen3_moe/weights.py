"""Qwen3-MoE: published weight names."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.weights import WeightMap, add_experts, add_gated_mlp, decoder_weights

_EXPERT = ("gate_proj", "up_proj", "down_proj")


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = decoder_weights(spec)
    routed = spec.moe.layers if spec.moe is not None else ()
    for layer in range(spec.layers):
        theirs = f"model.layers.{layer}.mlp"
        ours = f"blocks.{layer}.feed_forward"
        if layer in routed:
            add_experts(result, spec, theirs, ours, _EXPERT)
        else:
            add_gated_mlp(result, spec, theirs, ours)
    return result
