"""Qwen3.5: published weight names. A delta net has four input projections, with rows in order of heads."""

from __future__ import annotations

from weft.config.spec import DeltaSpec, ModelSpec
from weft.models.qwen3_next.weights import hybrid_weights
from weft.models.vision.weights import add_qwen_tower
from weft.models.weights import WeightMap


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    sees = spec.architecture.endswith("ForConditionalGeneration")
    result = hybrid_weights(spec, "model.language_model" if sees else "model", _add_projections)
    if sees:
        add_qwen_tower(result, spec)
    return result


def _add_projections(made: WeightMap, delta: DeltaSpec, theirs: str, ours: str) -> None:
    """Add the input projections of a delta net to ``made``, published as four matrices."""
    key = delta.k_heads * delta.k_dim
    value = delta.v_heads * delta.v_dim
    heads = delta.v_heads
    channels = 2 * key + value
    made.add(f"{theirs}.in_proj_qkv.weight", f"{ours}.qkvz.weight", slice(0, channels))
    made.add(f"{theirs}.in_proj_z.weight", f"{ours}.qkvz.weight", slice(channels, channels + value))
    made.add(f"{theirs}.in_proj_b.weight", f"{ours}.gates.weight", slice(0, heads))
    made.add(f"{theirs}.in_proj_a.weight", f"{ours}.gates.weight", slice(heads, 2 * heads))
