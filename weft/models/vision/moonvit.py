"""MoonViT, the tower of Kimi K2.5. Source: arXiv 2504.07491, section 2.1; 2602.02276."""

from __future__ import annotations

import torch
from torch import nn

from weft.config.spec import VisionSpec
from weft.layers.build import Build
from weft.layers.linear import Linear
from weft.models.vision.base import Embedding, Tower, axial_angles, colour_table, patches, places
from weft.models.vision.layers import MLP, LayerNorm, PatchBlock
from weft.models.vision.positions import cubic_taps, interpolated

Tensor = torch.Tensor


class MoonTower(Tower):
    """Patches with positions in the image and in time; frames become one by the mean of each place."""

    def __init__(self, vision: VisionSpec, build: Build) -> None:
        super().__init__()
        media = vision.media
        self._spec = vision
        self._wide = build.wide
        self._colours = colour_table(media, build.dtype, build.device)
        self.patch = Linear(3 * media.patch**2, vision.hidden, build, bias=True)
        self.positions = build.weight(vision.side**2, vision.hidden)
        shape = (vision.hidden, vision.heads, vision.intermediate, vision.activation, 1e-5, build)
        self.blocks = nn.ModuleList(PatchBlock(*shape) for _ in range(vision.layers))
        self.norm = LayerNorm(vision.hidden, 1e-5, build)
        self.merger_norm = LayerNorm(vision.hidden, vision.norm_eps, build)
        joined = vision.hidden * media.merge**2
        self.merger = MLP(joined, joined, vision.output, "gelu", build)

    def embed(self, image: Tensor) -> Embedding:
        spec, media = self._spec, self._spec.media
        frames = image.shape[0]
        if frames > spec.frames:
            raise ValueError(f"{frames} frames in one image; the model takes {spec.frames} at most")
        x = self.patch(patches(image, media, self._colours))
        rows, columns = image.shape[1] // media.patch, image.shape[2] // media.patch
        row, column = places(frames, rows, columns, 1, image.device)
        learned = interpolated(
            self.positions,
            cubic_taps(row, rows, spec.side, self._wide),
            cubic_taps(column, columns, spec.side, self._wide),
            self._wide,
        )
        if frames > 1:
            learned = learned + self._times(frames, image.device).repeat_interleave(rows * columns, 0)
        x = x + learned.to(x.dtype)
        dim = spec.hidden // spec.heads
        angles = axial_angles((column, row), dim, spec.theta, self._wide, alternating=True)
        for block in self.blocks:
            x = block(x, angles, 1)
        pooled = self._tokens(self.norm(x), frames, rows, columns)
        return Embedding(main=self.merger(self.merger_norm(pooled).flatten(1)))

    def _tokens(self, x: Tensor, frames: int, rows: int, columns: int) -> Tensor:
        """[tokens, merge^2, hidden]: the patches of each token, each the mean of its frames."""
        merge = self._spec.media.merge
        cut = x.view(frames, rows // merge, merge, columns // merge, merge, -1).mean(0)
        return cut.transpose(1, 2).reshape(-1, merge**2, x.shape[1])

    def _times(self, frames: int, device: torch.device) -> Tensor:
        """[frames, hidden]: sines, then cosines, of each frame's number."""
        hidden = self._spec.hidden
        exponents = torch.arange(0, hidden, 2, dtype=torch.float64, device=device) / hidden
        turned = torch.arange(frames, dtype=torch.float64, device=device).unsqueeze(1) * 10000.0**-exponents
        return torch.cat([turned.sin(), turned.cos()], dim=1).to(self._wide)
