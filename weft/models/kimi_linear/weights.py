"""Kimi Linear: published weight names."""

from __future__ import annotations

import torch

from weft.config.spec import DeltaSpec, ModelSpec
from weft.models.weights import WeightMap, add_experts, add_gated_mlp, decoder_weights

_EXPERT = ("w1", "w3", "w2")
_SHARED = ("gate_proj", "up_proj", "down_proj")


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = decoder_weights(spec)
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        if spec.delta is not None and layer in spec.delta.layers:
            _add_delta(result, spec.delta, f"{theirs}.self_attn", f"{ours}.attention")
        if spec.moe is not None and layer in spec.moe.layers:
            add_experts(
                result,
                spec,
                f"{theirs}.block_sparse_moe",
                f"{ours}.feed_forward",
                _EXPERT,
                shared_names=_SHARED,
            )
        else:
            _add_dense(result, spec, theirs, f"{ours}.feed_forward")
    return result


def _add_delta(made: WeightMap, delta: DeltaSpec, theirs: str, ours: str) -> None:
    """Add the tensors of Kimi Delta Attention to ``made``. A matrix of each convolution is published."""
    key, value = delta.k_heads * delta.k_dim, delta.v_heads * delta.v_dim
    begin = 0
    for name, size in (("q", key), ("k", key), ("v", value)):
        rows = slice(begin, begin + size)
        made.add(f"{theirs}.{name}_proj.weight", f"{ours}.qkv.weight", rows)
        made.add(f"{theirs}.{name}_conv1d.weight", f"{ours}.conv", rows)
        begin += size
    begin = 0
    for name, size in (("f_a", delta.gate_rank), ("g_a", delta.gate_rank), ("b", delta.v_heads)):
        made.add(f"{theirs}.{name}_proj.weight", f"{ours}.gates.weight", slice(begin, begin + size))
        begin += size
    made.add(f"{theirs}.f_b_proj.weight", f"{ours}.decay.weight")
    made.add(f"{theirs}.g_b_proj.weight", f"{ours}.gate.weight")
    made.add(f"{theirs}.A_log", f"{ours}.log_rate", read=torch.flatten)  # published as [1, 1, heads, 1]
    made.add(f"{theirs}.dt_bias", f"{ours}.step_bias")
    made.add(f"{theirs}.o_norm.weight", f"{ours}.norm")
    made.add(f"{theirs}.o_proj.weight", f"{ours}.out.weight")


def _add_dense(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add a dense feed-forward block to ``made``. transformers saves the block as ``block_sparse_moe``."""
    forms = []
    for name in ("mlp", "block_sparse_moe"):
        before = set(made.placements)
        add_gated_mlp(made, spec, f"{theirs}.{name}", ours)
        forms.append(tuple(one for one in made.placements if one not in before))
    made.choices.append(tuple(forms))
