"""Mamba2: a Mamba2 in every layer, on a stream of float32 if the checkpoint has ``residual_in_fp32``."""

from __future__ import annotations

from typing import Any

import torch

from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.norms import WideStreamNorm
from weft.models.decoder import Block, Decoder
from weft.models.mixer_block import MixerBlock


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    block = MixerBlock(spec, layer, build, None)
    if spec.wide_stream:
        block.attention_norm = WideStreamNorm(spec.hidden, spec.norm_eps, build)
    return block


class Mamba2Decoder(Decoder):
    """The frame with a stream that may be wider than the model."""

    def __init__(self, spec: ModelSpec, build: Build, make_block: Any) -> None:
        super().__init__(spec, build, make_block)
        self._stream = build.wide if spec.wide_stream else build.dtype
        if spec.wide_stream:
            self.norm = WideStreamNorm(spec.hidden, spec.norm_eps, build)

    def enter(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.to(self._stream)
