"""Qwen3-Next: published weight names."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from weft.config.spec import DeltaSpec, ModelSpec
from weft.models.weights import WeightMap, add_block, add_experts, add_gated_mlp, decoder_weights


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    return hybrid_weights(spec, "model", _add_projections)


def hybrid_weights(
    spec: ModelSpec, prefix: str, add_projections: Callable[[WeightMap, DeltaSpec, str, str], None]
) -> WeightMap:
    """Return the weight map without input projections of delta nets; ``add_projections`` maps these
    projections.

    Weights of MTP modules (``mtp.``) are mapped if ``spec.mtp_layers``, else ignored.
    """
    result = decoder_weights(spec, prefix)
    for layer in range(spec.layers):
        theirs = f"{prefix}.layers.{layer}"
        ours = f"blocks.{layer}"
        _add_feed_forward(result, spec, layer, theirs, ours)
        if spec.delta is not None and layer in spec.delta.layers:
            _add_delta(result, f"{theirs}.linear_attn", f"{ours}.attention")
            add_projections(result, spec.delta, f"{theirs}.linear_attn", f"{ours}.attention")
    if spec.mtp_layers:
        _add_mtp(result, spec)
    else:
        result.ignored.append(re.compile(r"^mtp\."))
    return result


def _add_feed_forward(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the feed-forward of one layer to ``made``: experts or a gated MLP."""
    theirs = f"{theirs}.mlp"
    ours = f"{ours}.feed_forward"
    if spec.moe is not None and layer in spec.moe.layers:
        add_experts(made, spec, theirs, ours, shared="shared_expert")
    else:
        add_gated_mlp(made, spec, theirs, ours)


def _add_delta(made: WeightMap, theirs: str, ours: str) -> None:
    """Add the tensors of a delta net to ``made``, except the input projections."""
    made.add(f"{theirs}.conv1d.weight", f"{ours}.conv")
    made.add(f"{theirs}.A_log", f"{ours}.log_rate")
    made.add(f"{theirs}.dt_bias", f"{ours}.step_bias")
    made.add(f"{theirs}.norm.weight", f"{ours}.norm")
    made.add(f"{theirs}.out_proj.weight", f"{ours}.out.weight")


def _add_projections(made: WeightMap, delta: DeltaSpec, theirs: str, ours: str) -> None:
    """Add projections to ``made``, published per key head: q, k, v and z heads of the key head; b and a of
    the key head.
    """
    heads = delta.v_heads // delta.k_heads
    ends = [0]
    for size in (delta.k_dim, delta.k_dim, heads * delta.v_dim, heads * delta.v_dim):
        ends.append(ends[-1] + size)
    made.add(
        f"{theirs}.in_proj_qkvz.weight",
        f"{ours}.qkvz.weight",
        groups=delta.k_heads,
        parts=tuple(pairwise(ends)),
    )
    made.add(
        f"{theirs}.in_proj_ba.weight",
        f"{ours}.gates.weight",
        groups=delta.k_heads,
        parts=((0, heads), (heads, 2 * heads)),
    )


def _add_mtp(made: WeightMap, spec: ModelSpec) -> None:
    """Add the single MTP module to ``made``: norms of the next token's embedding and of the hidden state,
    then a layer.
    """
    made.add_norm(spec, "mtp.pre_fc_norm_embedding", "mtp.0.embedding_norm")
    made.add_norm(spec, "mtp.pre_fc_norm_hidden", "mtp.0.hidden_norm")
    made.add("mtp.fc.weight", "mtp.0.project.weight")
    add_block(made, spec, spec.layers, "mtp.layers.0", "mtp.0.block")
    _add_feed_forward(made, spec, spec.layers, "mtp.layers.0", "mtp.0.block")
    made.add_norm(spec, "mtp.norm", "mtp.0.norm")
