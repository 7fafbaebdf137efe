"""Mamba2: published weight names. The first releases say ``embedding``, transformers says ``embeddings``."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.mixer_weights import add_decoder, add_recurrent
from weft.models.weights import WeightMap

_EMBEDDINGS = ("backbone.embeddings", "backbone.embedding")


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = WeightMap()
    first, second = _EMBEDDINGS
    add_decoder(result, spec, first, "backbone.norm_f")
    result.add(f"{second}.weight", "embedding.weight")
    result.choices.append(tuple((f"{name}.weight",) for name in _EMBEDDINGS))
    for layer in range(spec.layers):
        theirs, ours = f"backbone.layers.{layer}", f"blocks.{layer}"
        result.add_norm(spec, f"{theirs}.norm", f"{ours}.attention_norm")
        add_recurrent(result, spec, layer, f"{theirs}.mixer", f"{ours}.attention")
    return result
