"""Blocks of declared architectures."""

from __future__ import annotations

from weft.attention.gqa.gqa import Attention
from weft.attention.mla.mla import LatentAttention
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward, Layer
from weft.layers.dense import GatedMLP
from weft.models.decoder import Block
from weft.moe.block import RoutedMLP


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights. Layers from ``spec.layers`` on belong to MTP modules."""
    return Block(
        spec,
        build,
        attention=make_attention(spec, layer, build),
        feed_forward=make_feed_forward(spec, layer, build),
    )


def make_attention(spec: ModelSpec, layer: int, build: Build) -> Layer:
    """Build the attention of ``layer``: latent, or with grouped queries."""
    if spec.mla is not None:
        return LatentAttention(spec, layer, build)
    return Attention(spec, layer, build)


def make_feed_forward(spec: ModelSpec, layer: int, build: Build) -> FeedForward:
    """Build the feed-forward of ``layer``: routed experts or a dense block."""
    if spec.moe is not None and layer in spec.moe.layers:
        return RoutedMLP(spec.hidden, spec.moe, spec.activation, build)
    return GatedMLP(spec.hidden, spec.intermediate, spec.activation, build, bias=spec.mlp_bias)
