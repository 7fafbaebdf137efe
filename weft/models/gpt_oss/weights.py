"""GPT-OSS: published weight names.

Experts are published with their inputs first, [experts, inputs, outputs], and rows of gate and up in turn.
"""

from __future__ import annotations

import torch

from weft.config.spec import ModelSpec
from weft.models.weights import WeightMap, decoder_weights

Tensor = torch.Tensor


def weight_map(spec: ModelSpec) -> WeightMap:
    """Where each published tensor goes."""
    made = decoder_weights(spec)
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        made.add(f"{theirs}.self_attn.sinks", f"{ours}.attention.sinks")
        theirs, ours = f"{theirs}.mlp", f"{ours}.feed_forward"
        made.add_linear(f"{theirs}.router", f"{ours}.router", bias=True)
        experts = f"{theirs}.experts"
        made.add(f"{experts}.gate_up_proj", f"{ours}.experts.gate_up", read=_gate_up)
        made.add(f"{experts}.gate_up_proj_bias", f"{ours}.experts.gate_up_bias", read=_in_halves)
        made.add(f"{experts}.down_proj", f"{ours}.experts.down", read=_transposed)
        made.add(f"{experts}.down_proj_bias", f"{ours}.experts.down_bias")
    return made


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(-2, -1)


def _in_halves(rows: Tensor) -> Tensor:
    """[experts, 2 n, ...], gate and up in turn: gate rows first."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def _gate_up(weight: Tensor) -> Tensor:
    return _in_halves(_transposed(weight))
