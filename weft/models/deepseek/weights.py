"""DeepSeek V2 and V3: published weight names."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.weights import WeightMap, add_block, add_experts, add_gated_mlp, decoder_weights


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    return latent_weights(spec, "model", "lm_head")


def latent_weights(spec: ModelSpec, prefix: str, head: str) -> WeightMap:
    """Return the weight map of a text model with names below ``prefix``, except the ``head``.

    MTP modules are published as layers behind the last layer, with copies of embedding and head.
    """
    result = decoder_weights(spec, prefix, head)
    for layer in range(spec.layers):
        _add_feed_forward(result, spec, layer, f"{prefix}.layers.{layer}", f"blocks.{layer}")
    for module in range(spec.mtp_layers):
        layer = spec.layers + module
        ours = f"mtp.{module}"
        theirs = f"{prefix}.layers.{layer}"
        add_block(result, spec, layer, theirs, f"{ours}.block")
        _add_feed_forward(result, spec, layer, theirs, f"{ours}.block")
        result.add(f"{theirs}.enorm.weight", f"{ours}.embedding_norm.weight")
        result.add(f"{theirs}.hnorm.weight", f"{ours}.hidden_norm.weight")
        result.add(f"{theirs}.eh_proj.weight", f"{ours}.project.weight")
        result.add(f"{theirs}.shared_head.norm.weight", f"{ours}.norm.weight")
        result.same_as[f"{theirs}.embed_tokens.weight"] = f"{prefix}.embed_tokens.weight"
        if spec.head:
            same = f"{prefix}.embed_tokens.weight" if spec.tied else f"{head}.weight"
            result.same_as[f"{theirs}.shared_head.head.weight"] = same
    return result


def _add_feed_forward(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the names of the feed-forward of one layer to ``made``: experts or a gated MLP."""
    theirs = f"{theirs}.mlp"
    if spec.moe is not None and layer in spec.moe.layers:
        add_experts(made, spec, theirs, f"{ours}.feed_forward", ("gate_proj", "up_proj", "down_proj"))
    else:
        add_gated_mlp(made, spec, theirs, f"{ours}.feed_forward")
