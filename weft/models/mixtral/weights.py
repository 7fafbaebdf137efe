"""Mixtral: published weight names."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.weights import WeightMap, add_experts, decoder_weights

_EXPERT = ("w1", "w3", "w2")


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = decoder_weights(spec)
    for layer in range(spec.layers):
        theirs = f"model.layers.{layer}.block_sparse_moe"
        ours = f"blocks.{layer}.feed_forward"
        add_experts(result, spec, theirs, ours, _EXPERT)
    return result
