"""Bailing hybrid: weight names as published, and as in the modules of transformers."""

from __future__ import annotations

import re
from typing import NamedTuple

from weft.config.spec import DeltaSpec, ModelSpec
from weft.models.mixer_weights import add_convolutions
from weft.models.weights import WeightMap, add_experts, add_gated_mlp, decoder_weights


class _Form(NamedTuple):
    """Spellings of one form."""

    attention: str
    gate: str
    """Beginning of the tensors of the decays."""


_FORMS = (_Form("attention", ""), _Form("self_attn", "forget_gate."))
"""As published, and as in transformers."""
_OUTS = ("attention.dense", "attention.o_proj", "self_attn.dense", "self_attn.o_proj")
"""Names of the output matrix of a mixer."""


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model. Modules that predict further tokens are skipped."""
    result = decoder_weights(spec)
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        _add_attention(result, spec, layer, theirs, f"{ours}.attention")
        block = f"{theirs}.mlp"
        if spec.moe is not None and layer in spec.moe.layers:
            add_experts(result, spec, block, f"{ours}.feed_forward")
            names = (f"{block}.gate.e_score_correction_bias", f"{block}.gate.expert_bias")
            result.add(names[1], result.placements[names[0]].parameter)
            result.choices.append(tuple((name,) for name in names))
        else:
            add_gated_mlp(result, spec, block, f"{ours}.feed_forward")
    result.add("model.word_embeddings.weight", "embedding.weight")
    result.choices.append((("model.embed_tokens.weight",), ("model.word_embeddings.weight",)))
    result.ignored.append(re.compile(rf"^model\.(layers\.{spec.layers}|mtp\w*)\."))
    return result


def _add_attention(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the mixer of a layer to ``made``, in both forms."""
    delta = spec.delta if spec.delta is not None and layer in spec.delta.layers else None
    forms, convs = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for form in _FORMS:
        block = f"{theirs}.{form.attention}"
        one = WeightMap()
        if delta is not None:
            _add_delta(one, delta, block, form.gate, ours)
            convs += add_convolutions(made, delta, block, ours)
        else:
            one.add(f"{block}.g_proj.weight", f"{ours}.gate.weight")
            for name, placed in made.placements.items():
                if name.startswith(f"{theirs}.self_attn.") and ".o_proj." not in name:
                    one.placements[name.replace(".self_attn.", f".{form.attention}.")] = placed
        forms.append(tuple(one.placements))
        # The names of latent attention in the second form are in the map already.
        made.placements = {**made.placements, **one.placements}
    made.choices += [tuple(forms), *([tuple(convs)] if convs else [])]
    bias = spec.o_bias and delta is None
    outs = list[tuple[str, ...]]()
    for name in _OUTS:
        one = WeightMap()
        one.add_linear(f"{theirs}.{name}", f"{ours}.out", bias=bias)
        outs.append(tuple(one.placements))
        made.placements = {**made.placements, **one.placements}
    made.choices.append(tuple(outs))


def _add_delta(made: WeightMap, delta: DeltaSpec, theirs: str, gate: str, ours: str) -> None:
    """Add the tensors of Kimi Delta Attention to ``made``, except the convolution and the output matrix.

    ``gate``: beginning of the names of decays.
    """
    size = delta.k_heads * delta.k_dim
    for number, name in enumerate("qkvg"):
        rows = slice(number * size, (number + 1) * size)
        made.add(f"{theirs}.{name}_proj.weight", f"{ours}.qkvz.weight", rows)
    made.add(f"{theirs}.b_proj.weight", f"{ours}.gates.weight", slice(0, delta.v_heads))
    decays = slice(delta.v_heads, delta.v_heads + delta.decays)
    made.add(f"{theirs}.{gate}f_proj.weight", f"{ours}.gates.weight", decays)
    made.add(f"{theirs}.{gate}A_log", f"{ours}.log_rate")
    made.add(f"{theirs}.{gate}dt_bias", f"{ours}.step_bias")
    made.add(f"{theirs}.o_norm.weight", f"{ours}.norm")
