"""The tower of Qwen3-VL, and without levels of Qwen3.5. Source: arXiv 2511.21631, section 2."""

from __future__ import annotations

import torch
from torch import nn

from weft.config.spec import VisionSpec
from weft.layers.build import Build, Layer
from weft.layers.linear import Linear
from weft.models.vision.base import Embedding, Tower, axial_angles, colour_table, patches, places
from weft.models.vision.layers import MLP, LayerNorm, PatchBlock
from weft.models.vision.positions import interpolated, linear_taps

Tensor = torch.Tensor


class Merger(Layer):
    """The patches of a token become one row. ``after``: they are normalized when they are joined."""

    def __init__(self, vision: VisionSpec, build: Build, *, after: bool) -> None:
        super().__init__()
        joined = vision.hidden * vision.media.merge**2
        self.norm = LayerNorm(joined if after else vision.hidden, vision.norm_eps, build)
        self.mlp = MLP(joined, joined, vision.output, "gelu", build)
        self._after = after
        self._joined = joined

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, hidden], the patches of a token together; [tokens, output]."""
        if self._after:
            joined = self.norm(x.view(-1, self._joined))
        else:
            joined = self.norm(x).view(-1, self._joined)
        result: Tensor = self.mlp(joined)
        return result


class QwenTower(Tower):
    """Patches with interpolated positions, blocks that rotate by row and column, and mergers."""

    def __init__(self, vision: VisionSpec, build: Build) -> None:
        super().__init__()
        media = vision.media
        self._spec = vision
        self._wide = build.wide
        self._colours = colour_table(media, build.dtype, build.device)
        self.patch = Linear(3 * media.temporal * media.patch**2, vision.hidden, build, bias=True)
        self.positions = build.weight(vision.side**2, vision.hidden)
        shape = (vision.hidden, vision.heads, vision.intermediate, vision.activation, 1e-6, build)
        self.blocks = nn.ModuleList(PatchBlock(*shape) for _ in range(vision.layers))
        self.merger = Merger(vision, build, after=False)
        self.levels = nn.ModuleList(Merger(vision, build, after=True) for _ in vision.levels)

    def embed(self, image: Tensor) -> Embedding:
        spec, media = self._spec, self._spec.media
        x = self.patch(patches(image, media, self._colours))
        rows, columns = image.shape[1] // media.patch, image.shape[2] // media.patch
        frames = -(-image.shape[0] // media.temporal)
        row, column = places(frames, rows, columns, media.merge, image.device)
        learned = interpolated(
            self.positions,
            linear_taps(row, rows, spec.side, self._wide),
            linear_taps(column, columns, spec.side, self._wide),
            self._wide,
        )
        x = x + learned.to(x.dtype)
        dim = spec.hidden // spec.heads
        angles = axial_angles((row, column), dim, spec.theta, self._wide, alternating=False)
        levels: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            x = block(x, angles, frames)
            if layer in spec.levels:
                levels.append(self.levels[len(levels)](x))
        return Embedding(main=self.merger(x), levels=torch.stack(levels) if levels else None)
