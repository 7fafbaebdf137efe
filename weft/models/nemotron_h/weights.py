"""Nemotron-H: published weight names. A published layer is one part of a layer here."""

from __future__ import annotations

import re

from weft.config.spec import ModelSpec
from weft.models.mixer_weights import add_decoder, add_grouped_attention, add_mamba
from weft.models.weights import WeightMap


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model. Modules that predict further tokens (``mtp.``) are skipped."""
    result = WeightMap(ignored=[re.compile(r"^mtp\.")])
    add_decoder(result, spec, "backbone.embeddings", "backbone.norm_f")
    part = 0  # number of the published layer
    for layer in range(spec.layers):
        theirs, ours = f"backbone.layers.{part}", f"blocks.{layer}"
        result.add_norm(spec, f"{theirs}.norm", f"{ours}.attention_norm")
        if spec.mamba is not None and layer in spec.mamba.layers:
            add_mamba(result, spec.mamba, f"{theirs}.mixer", f"{ours}.attention")
        else:
            add_grouped_attention(result, spec, f"{theirs}.mixer", f"{ours}.attention")
        part += 1
        if layer in spec.bare_layers:
            continue
        theirs = f"backbone.layers.{part}"
        result.add_norm(spec, f"{theirs}.norm", f"{ours}.feed_forward_norm")
        _add_feed_forward(result, spec, layer, f"{theirs}.mixer", f"{ours}.feed_forward")
        part += 1
    return result


def _add_feed_forward(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the feed-forward of one layer to ``made``: experts or a dense block."""
    moe = spec.moe
    if moe is None or layer not in moe.layers:
        made.add(f"{theirs}.up_proj.weight", f"{ours}.up.weight")
        made.add(f"{theirs}.down_proj.weight", f"{ours}.down.weight")
        return
    made.add(f"{theirs}.gate.weight", f"{ours}.router.weight")
    made.add(f"{theirs}.gate.e_score_correction_bias", f"{ours}.router.correction")
    made.add(f"{theirs}.shared_experts.up_proj.weight", f"{ours}.shared.gate_up")
    made.add(f"{theirs}.shared_experts.down_proj.weight", f"{ours}.shared.down")
    if moe.latent:
        made.add(f"{theirs}.fc1_latent_proj.weight", f"{ours}.enter.weight")
        made.add(f"{theirs}.fc2_latent_proj.weight", f"{ours}.leave.weight")
    single = []
    for expert in range(moe.experts):
        for name, parameter in (("up_proj", "gate_up"), ("down_proj", "down")):
            single.append(f"{theirs}.experts.{expert}.{name}.weight")
            made.add(single[-1], f"{ours}.experts.{parameter}", expert)
    made.add(f"{theirs}.experts.up_proj", f"{ours}.experts.gate_up")
    made.add(f"{theirs}.experts.down_proj", f"{ours}.experts.down")
    made.choices.append((tuple(single), (f"{theirs}.experts.up_proj", f"{theirs}.experts.down_proj")))
