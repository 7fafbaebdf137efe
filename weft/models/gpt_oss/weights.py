"""GPT-OSS: published weight names.

Experts are published with inputs first, [experts, inputs, outputs], and with alternating rows of gate and up.
"""

from __future__ import annotations

import torch

from weft.config.spec import ModelSpec
from weft.models.weights import WeightMap, decoder_weights

Tensor = torch.Tensor


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
        result.add(f"{experts}.gate_up_proj", f"{ours}.experts.gate_up", read=_gate_up)
        result.add(f"{experts}.gate_up_proj_bias", f"{ours}.experts.gate_up_bias", read=_in_halves)
        result.add(f"{experts}.down_proj", f"{ours}.experts.down", read=_transposed)
        result.add(f"{experts}.down_proj_bias", f"{ours}.experts.down_bias")
    return result


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(-2, -1)


def _in_halves(rows: Tensor) -> Tensor:
    """Return [experts, 2 n, ...] with all gate rows first, from alternating rows of gate and up."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def _gate_up(weight: Tensor) -> Tensor:
    return _in_halves(_transposed(weight))
