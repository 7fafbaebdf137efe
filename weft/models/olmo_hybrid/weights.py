"""OLMo Hybrid: published weight names."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from weft.config.spec import DeltaSpec, ModelSpec
from weft.models.mixer_weights import add_convolutions, add_decoder
from weft.models.weights import Placement, WeightMap, add_attention, add_gated_mlp

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


_RESAVED = re.compile(r"\.layers\.(\d+)\.feedforward_layer_norm\.weight$")
_DELTA = re.compile(r"\.layers\.(\d+)\.linear_attn\.")
_CONVOLUTION = re.compile(r"\.linear_attn\.([qkv])_conv1d\.weight$")


@dataclass(slots=True)
class SavedNames(WeightMap):
    """A weight map that takes the convolutions of published files, and of files saved by transformers.

    transformers 5 saves the joined convolution of q, k and v in three equal parts, although values have more
    rows. Such files also have the name of a delta net's norm in layers with attention, which tells them from
    published files.
    """

    def published_as(self, names: Collection[str]) -> WeightMap:
        """Return the map in the names, and with the parts, of a checkpoint with tensors ``names``."""
        # Named class: ``super()`` without arguments fails in a dataclass with slots.
        made = WeightMap.published_as(self, names)
        delta = {m[1] for name in made.placements if (m := _DELTA.search(name))}
        if any((m := _RESAVED.search(name)) and m[1] not in delta for name in names):
            made.placements = {name: _of_equal_parts(name, made) for name in made.placements}
        return made


def _of_equal_parts(name: str, made: WeightMap) -> Placement:
    """Return the placement of ``name`` in ``made``, of a third of the rows for a convolution of q, k or v."""
    placed, found = made.placements[name], _CONVOLUTION.search(name)
    if found is None:
        return placed
    last = made.placements[name.replace(f"{found[1]}_conv1d", "v_conv1d")].index[0]
    assert isinstance(last, slice)
    third, number = -(-last.stop // 3), "qkv".index(found[1])  # as torch.chunk
    return replace(placed, index=(slice(number * third, min((number + 1) * third, last.stop)),))


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
    return SavedNames(result.placements, result.choices, result.same_as, result.ignored)


def _add_delta(made: WeightMap, delta: DeltaSpec, theirs: str, ours: str) -> None:
    """Add the tensors of a delta net to ``made``. A convolution for each of q, k and v is published, or a
    single convolution.
    """
    key, value = delta.k_heads * delta.k_dim, delta.v_heads * delta.v_dim
    begin = 0
    for name, size in (("q", key), ("k", key), ("v", value), ("g", value)):
        rows = slice(begin, begin + size)
        made.add(f"{theirs}.{name}_proj.weight", f"{ours}.qkvz.weight", rows)
        begin += size
    made.choices.append(add_convolutions(made, delta, theirs, ours))
    made.add(f"{theirs}.b_proj.weight", f"{ours}.gates.weight", slice(0, delta.v_heads))
    made.add(f"{theirs}.a_proj.weight", f"{ours}.gates.weight", slice(delta.v_heads, 2 * delta.v_heads))
    made.add(f"{theirs}.A_log", f"{ours}.log_rate")
    made.add(f"{theirs}.dt_bias", f"{ours}.step_bias")
    made.add(f"{theirs}.o_norm.weight", f"{ours}.norm")
    made.add(f"{theirs}.o_proj.weight", f"{ours}.out.weight")
