"""OLMo Hybrid: a delta net with norms before, or attention with norms behind; a gated feed-forward."""

from __future__ import annotations

from weft.attention.delta.delta import DeltaNet
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.declared.model import TraitBlock, make_feed_forward
from weft.models.decoder import Block


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    if spec.delta is None or layer not in spec.delta.layers:
        return TraitBlock(spec, layer, build)
    feed_forward = make_feed_forward(spec, layer, build)
    return Block(spec, build, attention=DeltaNet(spec, layer, build), feed_forward=feed_forward)
