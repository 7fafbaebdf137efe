"""Construction of the tower of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.config.spec import VisionSpec
from weft.layers.build import Build
from weft.models.vision.base import Tower
from weft.models.vision.moonvit import MoonTower
from weft.models.vision.published import PublishedTower
from weft.models.vision.qwen3_vl import QwenTower
from weft.models.vision.whole_images import ImageTower

_TOWERS: dict[str, Callable[[VisionSpec, Build], Tower]] = {
    "qwen3_vl": QwenTower,
    "moonvit": MoonTower,
    "qwen2_vl": PublishedTower,
    "qwen2_5_vl": PublishedTower,
    "gemma3": ImageTower,
    "gemma4": ImageTower,
    "mistral3": ImageTower,
    "internvl": ImageTower,
    "llama4": ImageTower,
}


def make_tower(vision: VisionSpec, build: Build) -> Tower:
    """Build the tower with unset weights. Every rank has the complete tower; ``--quantization`` does not
    apply."""
    return _TOWERS[vision.kind](vision, replace(build, quantization="none"))
