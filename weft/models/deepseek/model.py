"""DeepSeek V2 and V3: latent attention; all but the first feed-forward blocks are routed experts."""

from __future__ import annotations

from weft.attention.mla import LatentAttention
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.mlp import GatedMLP
from weft.models.decoder import Block
from weft.moe.block import RoutedMLP


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Layer ``layer``, its weights unset; from ``spec.layers`` on that of a module that predicts ahead."""
    attention = LatentAttention(spec, layer, build)
    return Block(spec, build, attention=attention, feed_forward=make_feed_forward(spec, layer, build))


def make_feed_forward(spec: ModelSpec, layer: int, build: Build) -> FeedForward:
    """What follows the attention of ``layer``."""
    if spec.moe is not None and layer in spec.moe.layers:
        return RoutedMLP(spec.hidden, spec.moe, spec.activation, build)
    return GatedMLP(spec.hidden, spec.intermediate, spec.activation, build)
