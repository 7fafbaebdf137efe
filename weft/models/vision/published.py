"""Towers with the modules of transformers. Weft's loader fills the parameters by the names of the modules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

from weft.common.errors import ConfigError
from weft.config.spec import VisionSpec
from weft.layers.build import Build
from weft.models.vision.base import Embedding, Tower, check_image, colour_table, patches
from weft.models.weights import WeightMap

Tensor = torch.Tensor

_CLASSES = {
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
}
"""Kind, which is the package in transformers -> (configuration class, tower class)."""


class PublishedTower(Tower):
    """A tower of transformers, on one rank. The tower encodes one image per call."""

    capturable = False  # the modules read the grid of the image on the host

    def __init__(self, vision: VisionSpec, build: Build) -> None:
        """Build the tower with unset weights. Raises ConfigError if transformers cannot make the tower."""
        super().__init__()
        self._media = vision.media
        self._colours = colour_table(vision.media, build.dtype, build.device)
        self.module = skeleton(vision)
        for part in self.module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = build.weight(*parameter.shape)
        fill_buffers(self.module, build.device)

    def embed_batch(self, images: Sequence[Tensor]) -> list[Embedding]:
        """Encode images one by one; see ``Tower.embed_batch``."""
        for image in images:
            check_image(image, self._media)
        return [self._embed(image) for image in images]

    def _embed(self, image: Tensor) -> Embedding:
        media = self._media
        groups = -(-image.shape[0] // media.temporal)
        grid = [groups, image.shape[1] // media.patch, image.shape[2] // media.patch]
        made = self.module(
            patches(image, media, self._colours), grid_thw=torch.tensor([grid], device=image.device)
        )
        return Embedding(main=made.pooler_output)


def skeleton(vision: VisionSpec) -> Any:
    """Return the tower of transformers without memory, on the meta device. Raises ConfigError."""
    config_name, tower_name = _CLASSES[vision.kind]
    try:
        # An optional package: the reader of config.json has checked the version. Some towers have no name
        # at the top of the package.
        code = import_module(f"transformers.models.{vision.kind}.modeling_{vision.kind}")
        config_class, tower_class = getattr(code, config_name), getattr(code, tower_name)
        config = config_class(**json.loads(vision.settings))
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            return tower_class(config).eval()
    except Exception as error:  # modeling code raises many types
        raise ConfigError(
            f"transformers cannot make the tower from vision_config: {error}", param="--model"
        ) from error


@torch.no_grad()
def fill_buffers(module: Any, device: torch.device) -> None:
    """Compute the buffers that checkpoints do not contain: rotation frequencies, in float32.

    Transformers computes such buffers in ``_init_weights``, which also draws random weights. Raises
    ConfigError for a buffer that is not computed.
    """
    for part in module.modules():
        names = sorted(set(part._buffers) & part._non_persistent_buffers_set)
        for name in names:
            # NaN, or -1, shows a buffer that the class does not compute.
            old = part._buffers[name]
            unset = torch.nan if old.is_floating_point() or old.is_complex() else -1
            part._buffers[name] = torch.full_like(old, unset, device="cpu")
        if names:
            module._init_weights(part)
        for name in names:
            made = part._buffers[name]
            is_number = made.is_floating_point() or made.is_complex()
            if bool((made.isnan() if is_number else made < 0).any()):
                raise ConfigError(f"transformers does not compute the buffer {name}", param="--model")
            part._buffers[name] = part._buffers[name].to(device)


@cache
def _names(vision: VisionSpec) -> tuple[str, ...]:
    """Return the names of the tower's parameters."""
    return tuple(name for name, _ in skeleton(vision).named_parameters())


def add_published(made: WeightMap, vision: VisionSpec) -> None:
    """Add the tensors of a tower of transformers to ``made``, in the names with the first prefix."""
    for name in _names(vision):
        made.add(f"{vision.published[0]}{name}", f"vision.module.{name}")
