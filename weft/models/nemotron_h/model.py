"""Nemotron-H: Mamba2 or attention, then experts, a dense feed-forward, or nothing."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.plain_mlp import PlainMLP
from weft.models.decoder import Block
from weft.models.mixer_block import MixerBlock
from weft.moe.block import RoutedMLP
from weft.moe.latent_block import LatentRoutedMLP


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    return MixerBlock(spec, layer, build, _feed_forward(spec, layer, build))


def _feed_forward(spec: ModelSpec, layer: int, build: Build) -> FeedForward | None:
    """Return the feed-forward of ``layer``, or None if there is none."""
    if layer in spec.bare_layers:
        return None
    moe = spec.moe
    if moe is not None and layer in moe.layers:
        routed = LatentRoutedMLP if moe.latent else RoutedMLP
        return routed(spec.hidden, moe, spec.activation, build)
    return PlainMLP(spec.hidden, spec.intermediate, spec.activation, build)
