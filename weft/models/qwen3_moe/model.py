"""Qwen3-MoE: Qwen3 attention; some or all feed-forward blocks are routed experts."""

from __future__ import annotations

from weft.attention.gqa.gqa import Attention
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.dense import GatedMLP
from weft.models.decoder import Block
from weft.moe.block import RoutedMLP


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights.

    Experts stand in the layers of ``spec.moe.layers``, a gated MLP elsewhere.
    """
    feed_forward: FeedForward
    if spec.moe is not None and layer in spec.moe.layers:
        feed_forward = RoutedMLP(spec.hidden, spec.moe, spec.activation, build)
    else:
        feed_forward = GatedMLP(spec.hidden, spec.intermediate, spec.activation, build)
    return Block(spec, build, attention=Attention(spec, layer, build), feed_forward=feed_forward)
