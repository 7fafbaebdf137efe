"""Granite 4: Mamba2 or attention, then a dense feed-forward, or routed experts with a shared expert."""

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
    if spec.moe is not None:
        feed_forward = RoutedMLP(spec.hidden, spec.moe, spec.activation, build)
    else:
        feed_forward = GatedMLP(spec.hidden, spec.intermediate, spec.activation, build)
    return MixerBlock(spec, layer, build, feed_forward)
