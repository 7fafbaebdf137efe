"""Bailing hybrid: Kimi Delta Attention or latent attention, then routed experts or a dense feed-forward."""

from __future__ import annotations

from weft.attention.delta.delta import DeltaNet
from weft.attention.mla.mla import LatentAttention
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.decoder import Block
from weft.models.deepseek.model import make_feed_forward


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    recurrent = spec.delta is not None and layer in spec.delta.layers
    attention = DeltaNet(spec, layer, build) if recurrent else LatentAttention(spec, layer, build)
    return Block(spec, build, attention=attention, feed_forward=make_feed_forward(spec, layer, build))
