"""DeepSeek V3.2 and GLM-5: published weight names."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.models.deepseek.weights import weight_map as without_indexers
from weft.models.weights import WeightMap


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = without_indexers(spec)
    index = spec.index
    assert index is not None
    for layer in index.layers:
        theirs = f"model.layers.{layer}.self_attn.indexer"
        ours = f"blocks.{layer}.attention.indexer"
        result.add(f"{theirs}.wq_b.weight", f"{ours}.q_up.weight")
        result.add(f"{theirs}.wk.weight", f"{ours}.down.weight", slice(0, index.dim))
        result.add(f"{theirs}.weights_proj.weight", f"{ours}.down.weight", slice(index.dim, None))
        result.add(f"{theirs}.k_norm.weight", f"{ours}.key_norm")
        result.add(f"{theirs}.k_norm.bias", f"{ours}.key_bias")
    return result
