"""Mixtral: Mistral attention, routed experts in every layer."""

from __future__ import annotations

from weft.attention.gqa.gqa import Attention
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.decoder import Block
from weft.moe.block import RoutedMLP


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights: attention and routed experts."""
    assert spec.moe is not None
    return Block(
        spec,
        build,
        attention=Attention(spec, layer, build),
        feed_forward=RoutedMLP(spec.hidden, spec.moe, spec.activation, build),
    )
