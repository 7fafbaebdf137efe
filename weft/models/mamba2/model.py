"""Mamba2: a Mamba2 in every layer."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.decoder import Block
from weft.models.mixer_block import MixerBlock


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    return MixerBlock(spec, layer, build, None)
