"""Qwen3-VL: published weight names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from weft.config.spec import ModelSpec
from weft.models.vision.weights import add_qwen_tower
from weft.models.weights import WeightMap, add_experts, add_gated_mlp, decoder_weights

_PREFIX = "model.language_model"


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = decoder_weights(spec, _PREFIX)
    for layer in range(spec.layers):
        theirs = f"{_PREFIX}.layers.{layer}.mlp"
        ours = f"blocks.{layer}.feed_forward"
        if spec.moe is not None and layer in spec.moe.layers:
            _add_experts(result, spec, theirs, ours)
        else:
            add_gated_mlp(result, spec, theirs, ours)
    add_qwen_tower(result, spec)
    return result


def _add_experts(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add experts to ``made``.

    Fused matrices are published as [experts, hidden, 2 n] and [experts, n, hidden].
    """
    add_experts(made, spec, theirs, ours)
    assert spec.moe is not None
    n, hidden = spec.moe.intermediate, spec.hidden
    for name, shape in (("gate_up_proj", (2 * n, hidden)), ("down_proj", (hidden, n))):
        fused = f"{theirs}.experts.{name}"
        made.placements[fused] = replace(made.placements[fused], read=partial(_outputs_first, shape=shape))


def _outputs_first(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Transpose ``values`` unless their matrices have ``shape`` already, as in files of transformers 5."""
    return values if tuple(values.shape[1:]) == shape else values.transpose(1, 2)
