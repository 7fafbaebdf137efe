"""Qwen3.5: published weight names. A delta net has four input projections, with rows in order of heads."""

from __future__ import annotations

import re

from weft.common.log import get_logger
from weft.config.spec import DeltaSpec, ModelSpec
from weft.models.qwen3_next.weights import hybrid_weights
from weft.models.weights import WeightMap

_log = get_logger(__name__)


def weight_map(spec: ModelSpec) -> WeightMap:
    """Where each published tensor goes. A vision tower's have no effect."""
    sees = spec.architecture.endswith("ForConditionalGeneration")
    result = hybrid_weights(spec, "model.language_model" if sees else "model", _add_projections)
    if sees:
        _log.info("text alone is served: the vision tower of this checkpoint is not loaded")
        result.ignored.append(re.compile(r"^model\.visual\."))
    return result


def _add_projections(made: WeightMap, delta: DeltaSpec, theirs: str, ours: str) -> None:
    key = delta.k_heads * delta.k_dim
    value = delta.v_heads * delta.v_dim
    heads = delta.v_heads
    channels = 2 * key + value
    made.add(f"{theirs}.in_proj_qkv.weight", f"{ours}.qkvz.weight", slice(0, channels))
    made.add(f"{theirs}.in_proj_z.weight", f"{ours}.qkvz.weight", slice(channels, channels + value))
    made.add(f"{theirs}.in_proj_b.weight", f"{ours}.gates.weight", slice(0, heads))
    made.add(f"{theirs}.in_proj_a.weight", f"{ours}.gates.weight", slice(heads, 2 * heads))
