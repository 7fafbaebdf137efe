"""GPT-OSS: published weight names.

Experts are published with inputs first, [experts, inputs, outputs], and with alternating rows of gate and up.
"""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.weights import WeightMap, decoder_weights, in_halves, in_order, transposed


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = decoder_weights(spec)
    for layer in range(spec.layers):
        theirs = f"model.layers.{layer}"
        ours = f"blocks.{layer}"
        result.add(f"{theirs}.self_attn.sinks", f"{ours}.attention.sinks")
        theirs = f"{theirs}.mlp"
        ours = f"{ours}.feed_forward"
        result.add_linear(f"{theirs}.router", f"{ours}.router", bias=True)
        experts = f"{theirs}.experts"
        result.add(f"{experts}.gate_up_proj", f"{ours}.experts.gate_up", read=in_order(transposed, in_halves))
        result.add(f"{experts}.gate_up_proj_bias", f"{ours}.experts.gate_up_bias", read=in_halves)
        result.add(f"{experts}.down_proj", f"{ours}.experts.down", read=transposed)
        result.add(f"{experts}.down_proj_bias", f"{ours}.experts.down_bias")
    return result
