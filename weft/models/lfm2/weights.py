"""LFM2: published weight names."""

from __future__ import annotations

import re

from weft.config.spec import ModelSpec
from weft.models.mixer_weights import add_decoder, add_grouped_attention, add_routed
from weft.models.weights import WeightMap

_MLP = ("w1", "w3", "w2")
"""Names of gate, up and down matrices, in dense blocks and in experts."""


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = WeightMap(ignored=[re.compile(r"\.inv_freq$")])
    add_decoder(result, spec, "model.embed_tokens", "model.embedding_norm")
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        result.add_norm(spec, f"{theirs}.operator_norm", f"{ours}.attention_norm")
        result.add_norm(spec, f"{theirs}.ffn_norm", f"{ours}.feed_forward_norm")
        if spec.conv is not None and layer in spec.conv.layers:
            _add_conv(result, spec.conv.bias, f"{theirs}.conv", f"{ours}.attention")
        else:
            names = ("out_proj", "q_layernorm", "k_layernorm")
            add_grouped_attention(result, spec, f"{theirs}.self_attn", f"{ours}.attention", names)
        _add_feed_forward(result, spec, layer, f"{theirs}.feed_forward", f"{ours}.feed_forward")
    return result


def _add_conv(made: WeightMap, bias: bool, theirs: str, ours: str) -> None:
    """Add the tensors of a short convolution to ``made``."""
    made.add_linear(f"{theirs}.in_proj", f"{ours}.bcx", bias=bias)
    made.add(f"{theirs}.conv.weight", f"{ours}.conv")
    if bias:
        made.add(f"{theirs}.conv.bias", f"{ours}.conv_bias")
    made.add_linear(f"{theirs}.out_proj", f"{ours}.out", bias=bias)


def _add_feed_forward(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the feed-forward block of one layer to ``made``: experts or a gated block."""
    if spec.moe is not None and layer in spec.moe.layers:
        add_routed(made, spec, theirs, ours, _MLP, correction="expert_bias")
        return
    gate, up, down = _MLP
    made.add(f"{theirs}.{gate}.weight", f"{ours}.gate_up.weight", slice(0, spec.intermediate))
    made.add(
        f"{theirs}.{up}.weight", f"{ours}.gate_up.weight", slice(spec.intermediate, 2 * spec.intermediate)
    )
    made.add(f"{theirs}.{down}.weight", f"{ours}.down.weight")
