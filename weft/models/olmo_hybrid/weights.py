"""OLMo Hybrid: published weight names."""

from __future__ import annotations

import re

from weft.config.spec import DeltaSpec, ModelSpec
from weft.models.mixer_weights import add_decoder
from weft.models.weights import WeightMap, add_attention, add_gated_mlp

_NORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "delta": {
        "attention_norm": ("input_layernorm", "attention_layer_norm"),
        "feed_forward_norm": ("post_attention_layernorm", "feedforward_layer_norm"),
    },
    "attention": {
        "attention_out_norm": ("post_attention_layernorm", "feedforward_layer_norm"),
        "feed_forward_out_norm": ("post_feedforward_layernorm",),
    },
}
"""Kind of layer -> norm in the block -> published names. transformers saves the last name of each."""


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model. Modules that predict further tokens (``mtp``) are skipped."""
    result = WeightMap(ignored=[re.compile(r"\.inv_freq$"), re.compile(r"^mtp")])
    add_decoder(result, spec, "model.embed_tokens", "model.norm")
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        recurrent = spec.delta is not None and layer in spec.delta.layers
        for norm, names in _NORMS["delta" if recurrent else "attention"].items():
            for name in names:
                result.add_norm(spec, f"{theirs}.{name}", f"{ours}.{norm}")
            if len(names) > 1:
                result.choices.append(tuple((f"{theirs}.{name}.weight",) for name in names))
        if spec.delta is not None and recurrent:
            _add_delta(result, spec.delta, f"{theirs}.linear_attn", f"{ours}.attention")
        else:
            add_attention(result, spec, layer, f"{theirs}.self_attn", f"{ours}.attention")
        add_gated_mlp(result, spec, f"{theirs}.mlp", f"{ours}.feed_forward")
    return result


def _add_delta(made: WeightMap, delta: DeltaSpec, theirs: str, ours: str) -> None:
    """Add the tensors of a delta net to ``made``. A convolution for each of q, k and v is published, or a
    single convolution.
    """
    key, value = delta.k_heads * delta.k_dim, delta.v_heads * delta.v_dim
    begin = 0
    for name, size in (("q", key), ("k", key), ("v", value), ("g", value)):
        rows = slice(begin, begin + size)
        made.add(f"{theirs}.{name}_proj.weight", f"{ours}.qkvz.weight", rows)
        if name != "g":
            made.add(f"{theirs}.{name}_conv1d.weight", f"{ours}.conv", rows)
        begin += size
    made.add(f"{theirs}.conv1d.weight", f"{ours}.conv")
    apart = tuple(f"{theirs}.{name}_conv1d.weight" for name in "qkv")
    made.choices.append((apart, (f"{theirs}.conv1d.weight",)))
    made.add(f"{theirs}.b_proj.weight", f"{ours}.gates.weight", slice(0, delta.v_heads))
    made.add(f"{theirs}.a_proj.weight", f"{ours}.gates.weight", slice(delta.v_heads, 2 * delta.v_heads))
    made.add(f"{theirs}.A_log", f"{ours}.log_rate")
    made.add(f"{theirs}.dt_bias", f"{ours}.step_bias")
    made.add(f"{theirs}.o_norm.weight", f"{ours}.norm")
    made.add(f"{theirs}.o_proj.weight", f"{ours}.out.weight")
