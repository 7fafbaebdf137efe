"""The tower that a model's facts name."""

from __future__ import annotations

from dataclasses import replace

from weft.config.spec import VisionSpec
from weft.layers.build import Build
from weft.models.vision.base import Tower
from weft.models.vision.moonvit import MoonTower
from weft.models.vision.qwen3_vl import QwenTower

_TOWERS = {"qwen3_vl": QwenTower, "moonvit": MoonTower}


def make_tower(vision: VisionSpec, build: Build) -> Tower:
    """The whole tower, its weights unset: every rank has it, and ``--quantization`` leaves it as it is."""
    return _TOWERS[vision.kind](vision, replace(build, quantization="none"))
