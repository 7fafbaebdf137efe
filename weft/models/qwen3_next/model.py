"""Qwen3-Next: a delta net or gated attention, then routed experts or a dense feed-forward block."""

from __future__ import annotations

from weft.attention.delta.delta import DeltaNet
from weft.attention.gqa.gqa import Attention
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.dense import GatedMLP
from weft.models.decoder import Block
from weft.moe.block import RoutedMLP


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights. Layers from ``spec.layers`` on belong to MTP modules."""
    recurrent = spec.delta is not None and layer in spec.delta.layers
    attention = DeltaNet(spec, layer, build) if recurrent else Attention(spec, layer, build)
    feed_forward: FeedForward
    if spec.moe is not None and layer in spec.moe.layers:
        feed_forward = RoutedMLP(spec.hidden, spec.moe, spec.activation, build)
    else:
        feed_forward = GatedMLP(spec.hidden, spec.intermediate, spec.activation, build)
    return Block(spec, build, attention=attention, feed_forward=feed_forward)
