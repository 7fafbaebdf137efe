"""Jamba: Mamba 1 or attention, then routed experts or a gated feed-forward block."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.dense import GatedMLP
from weft.models.decoder import Block
from weft.models.mixer_block import MixerBlock
from weft.moe.block import RoutedMLP


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    feed_forward: FeedForward
    if spec.moe is not None and layer in spec.moe.layers:
        feed_forward = RoutedMLP(spec.hidden, spec.moe, spec.activation, build)
    else:
        feed_forward = GatedMLP(spec.hidden, spec.intermediate, spec.activation, build)
    return MixerBlock(spec, layer, build, feed_forward)
