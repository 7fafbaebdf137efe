"""Weight map of declared architectures: every published form of every weight, in the names of Llama.

``FoundNames.published_as`` takes the spellings of a checkpoint (``names.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from weft.config.spec import ModelSpec
from weft.models.declared.names import spelled_as
from weft.models.deepseek.weights import latent_weights
from weft.models.weights import WeightMap


@dataclass(slots=True)
class FoundNames(WeightMap):
    """A weight map that takes the spellings of a checkpoint."""

    def published_as(self, names: Collection[str]) -> WeightMap:
        """Return the map in the names of a checkpoint with tensors ``names``.

        Raise ConfigError for two spellings of one role.
        """
        # Named class: ``super()`` without arguments fails in a dataclass with slots.
        return spelled_as(WeightMap.published_as(self, names), names)


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model, in the names of Llama."""
    made = latent_weights(spec, "model", "lm_head")
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        if spec.mla is None:
            _add_fused_attention(made, spec, f"{theirs}.self_attn", f"{ours}.attention")
        if spec.moe is None or layer not in spec.moe.layers:
            _add_fused_mlp(made, spec, f"{theirs}.mlp", f"{ours}.feed_forward")
    return FoundNames(made.placements, made.choices, made.same_as, made.ignored)


def _add_fused_attention(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add the alternative of one matrix for queries, keys and values, in this order."""
    if spec.output_gate:
        return
    kinds = ("weight", "bias") if spec.qkv_bias else ("weight",)
    made.add_linear(f"{theirs}.qkv_proj", f"{ours}.qkv", bias=spec.qkv_bias)
    apart = tuple(f"{theirs}.{name}_proj.{kind}" for name in "qkv" for kind in kinds)
    made.choices.append((apart, tuple(f"{theirs}.qkv_proj.{kind}" for kind in kinds)))


def _add_fused_mlp(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add the alternative of one matrix for gate and up, gate first."""
    kinds = ("weight", "bias") if spec.mlp_bias else ("weight",)
    made.add_linear(f"{theirs}.gate_up_proj", f"{ours}.gate_up", bias=spec.mlp_bias)
    apart = tuple(f"{theirs}.{name}_proj.{kind}" for name in ("gate", "up") for kind in kinds)
    made.choices.append((apart, tuple(f"{theirs}.gate_up_proj.{kind}" for kind in kinds)))
