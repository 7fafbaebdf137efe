"""Llama 2 and 3.x: grouped queries, rotary positions, gated SiLU feed-forward."""

from __future__ import annotations

from weft.attention.gqa.gqa import Attention
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.dense import GatedMLP
from weft.models.decoder import Block


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights: attention and a gated MLP."""
    return Block(
        spec,
        build,
        attention=Attention(spec, layer, build),
        feed_forward=GatedMLP(spec.hidden, spec.intermediate, spec.activation, build, bias=spec.mlp_bias),
    )
