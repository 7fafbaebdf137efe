"""MoonViT, the tower of Kimi K2.5. Source: arXiv 2504.07491, section 2.1; 2602.02276."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.config.spec import VisionSpec
from weft.layers.build import Build
from weft.models.vision.base import Grid, PatchTower, Placed, places
from weft.models.vision.layers import MLP, LayerNorm
from weft.models.vision.positions import cubic_taps, interpolated

Tensor = torch.Tensor


class MoonTower(PatchTower):
    """Tower with positions in the image and in time. Frames are merged by the mean at each patch position."""

    def __init__(self, vision: VisionSpec, build: Build) -> None:
        super().__init__(vision, build, eps=1e-5, alternating=True)
        self.norm = LayerNorm(vision.hidden, 1e-5, build)
        self.merger_norm = LayerNorm(vision.hidden, vision.norm_eps, build)
        joined = vision.hidden * vision.media.merge**2
        self.merger = MLP(joined, joined, vision.output, "gelu", build)

    def _grid(self, image: Tensor) -> Grid:
        """Return the grid of ``image``. Raises ValueError for more frames than the model accepts."""
        grid = super()._grid(image)
        if grid.frames > self._spec.frames:
            raise ValueError(
                f"{grid.frames} frames in one image; the model accepts at most {self._spec.frames}"
            )
        return grid

    def _group(self, grid: Grid) -> int:
        return grid.count  # patches attend to all frames

    def _tokens(self, grid: Grid) -> int:
        return grid.rows * grid.columns // self._spec.media.merge**2

    def _place(self, grid: Grid, device: torch.device) -> Placed:
        """Return learned positions [patches, hidden] and the two axes of rotation, column first."""
        spec = self._spec
        row, column = places(grid.frames, grid.rows, grid.columns, 1, device)
        learned = interpolated(
            self.positions,
            cubic_taps(row, grid.rows, spec.side, self._wide),
            cubic_taps(column, grid.columns, spec.side, self._wide),
            self._wide,
        )
        if grid.frames > 1:
            learned = learned + self._times(grid.frames, device).repeat_interleave(
                grid.rows * grid.columns, 0
            )
        return Placed(learned, (column, row))

    def _merge(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return [tokens, output] for patches x [N, hidden]: frames averaged, patches of a token joined."""
        counts = [grid.count for grid in grids]
        pooled = [
            self._pooled(part, grid) for part, grid in zip(self.norm(x).split(counts), grids, strict=True)
        ]
        result: Tensor = self.merger(self.merger_norm(torch.cat(pooled)).flatten(1))
        return result

    def _pooled(self, x: Tensor, grid: Grid) -> Tensor:
        """Return [tokens, merge^2, hidden]: the patches of each token, averaged over frames."""
        merge = self._spec.media.merge
        cut = x.view(grid.frames, grid.rows // merge, merge, grid.columns // merge, merge, -1).mean(0)
        return cut.transpose(1, 2).reshape(-1, merge**2, x.shape[1])

    def _times(self, frames: int, device: torch.device) -> Tensor:
        """Return [frames, hidden]: sines, then cosines, of each frame number."""
        hidden = self._spec.hidden
        exponents = torch.arange(0, hidden, 2, dtype=torch.float64, device=device) / hidden
        turned = torch.arange(frames, dtype=torch.float64, device=device).unsqueeze(1) * 10000.0**-exponents
        return torch.cat([turned.sin(), turned.cos()], dim=1).to(self._wide)
