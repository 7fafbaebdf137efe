"""Qwen3, dense: the heads of queries and keys are normalized before rotation."""

from __future__ import annotations

from weft.attention.gqa import Attention
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.mlp import GatedMLP
from weft.models.decoder import Block


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Layer ``layer``, its weights unset."""
    return Block(
        spec,
        build,
        attention=Attention(spec, layer, build),
        feed_forward=GatedMLP(spec.hidden, spec.intermediate, spec.activation, build),
    )
