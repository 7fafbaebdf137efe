"""LFM2: a short convolution or attention, then a gated feed-forward block or routed experts."""

from __future__ import annotations

from weft.attention.conv.conv import ShortConv
from weft.attention.gqa.gqa import Attention
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.dense import GatedMLP
from weft.models.decoder import Block
from weft.moe.block import RoutedMLP


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    recurrent = spec.conv is not None and layer in spec.conv.layers
    attention = ShortConv(spec, layer, build) if recurrent else Attention(spec, layer, build)
    feed_forward: FeedForward
    if spec.moe is not None and layer in spec.moe.layers:
        feed_forward = RoutedMLP(spec.hidden, spec.moe, spec.activation, build)
    else:
        feed_forward = GatedMLP(spec.hidden, spec.intermediate, spec.activation, build)
    return Block(spec, build, attention=attention, feed_forward=feed_forward)
