"""Llama 2 and 3.x: published weight names."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.weights import WeightMap, add_gated_mlp, decoder_weights


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = decoder_weights(spec)
    for layer in range(spec.layers):
        add_gated_mlp(result, spec, f"model.layers.{layer}.mlp", f"blocks.{layer}.feed_forward")
    return result
