"""Kimi K2.5: published weight names."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.deepseek.weights import latent_weights
from weft.models.vision.weights import add_moon_tower
from weft.models.weights import WeightMap


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = latent_weights(spec, "language_model.model", "language_model.lm_head")
    add_moon_tower(result, spec)
    return result
