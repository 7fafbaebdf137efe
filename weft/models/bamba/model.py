"""Bamba: Mamba2 or attention, then a gated feed-forward block."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.dense import GatedMLP
from weft.models.decoder import Block
from weft.models.mixer_block import MixerBlock


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    feed_forward = GatedMLP(spec.hidden, spec.intermediate, spec.activation, build, bias=spec.mlp_bias)
    return MixerBlock(spec, layer, build, feed_forward)
