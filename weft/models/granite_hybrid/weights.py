"""Granite 4: published weight names. Gate and up matrices are one tensor, gate first."""

from __future__ import annotations

import re

from weft.config.spec import ModelSpec
from weft.models.mixer_weights import add_decoder, add_mamba_or_attention
from weft.models.weights import WeightMap


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = WeightMap(ignored=[re.compile(r"\.inv_freq$")])
    add_decoder(result, spec, "model.embed_tokens", "model.norm")
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        result.add_norm(spec, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
        result.add_norm(spec, f"{theirs}.post_attention_layernorm", f"{ours}.feed_forward_norm")
        add_mamba_or_attention(result, spec, layer, theirs, ours)
        if spec.moe is None:
            result.add(f"{theirs}.shared_mlp.input_linear.weight", f"{ours}.feed_forward.gate_up.weight")
            result.add(f"{theirs}.shared_mlp.output_linear.weight", f"{ours}.feed_forward.down.weight")
        else:
            _add_experts(result, theirs, f"{ours}.feed_forward")
    return result


def _add_experts(made: WeightMap, theirs: str, ours: str) -> None:
    """Add routed experts and the shared expert to ``made``, under the published names or those of
    transformers 5.
    """
    made.add(f"{theirs}.shared_mlp.input_linear.weight", f"{ours}.shared.gate_up")
    made.add(f"{theirs}.shared_mlp.output_linear.weight", f"{ours}.shared.down")
    routed = f"{theirs}.block_sparse_moe"
    forms = (
        ("router.layer.weight", "input_linear.weight", "output_linear.weight"),
        ("router.weight", "experts.gate_up_proj", "experts.down_proj"),
    )
    for form in forms:
        for name, parameter in zip(form, ("router.weight", "experts.gate_up", "experts.down"), strict=True):
            made.add(f"{routed}.{name}", f"{ours}.{parameter}")
    made.choices.append(tuple(tuple(f"{routed}.{name}" for name in form) for form in forms))
