"""The tower of Qwen3-VL, and without levels of Qwen3.5. Source: arXiv 2511.21631, section 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weft.config.spec import VisionSpec
from weft.layers.build import Build, Layer
from weft.models.vision.base import Grid, PatchTower, Placed, places
from weft.models.vision.layers import MLP, LayerNorm
from weft.models.vision.positions import interpolated, linear_taps

Tensor = torch.Tensor


class Merger(Layer):
    """Merges the patches of a token into one row. ``after``: normalize after joining the patches, not
    before."""

    def __init__(self, vision: VisionSpec, build: Build, *, after: bool) -> None:
        super().__init__()
        joined = vision.hidden * vision.media.merge**2
        self.norm = LayerNorm(joined if after else vision.hidden, vision.norm_eps, build)
        self.mlp = MLP(joined, joined, vision.output, "gelu", build)
        self._after = after
        self._joined = joined

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, output] for x [N, hidden], with the patches of a token next to each other."""
        if self._after:
            joined = self.norm(x.view(-1, self._joined))
        else:
            joined = self.norm(x).view(-1, self._joined)
        result: Tensor = self.mlp(joined)
        return result


class QwenTower(PatchTower):
    """Tower with interpolated positions, blocks that rotate by row and column, and mergers."""

    def __init__(self, vision: VisionSpec, build: Build) -> None:
        super().__init__(vision, build, eps=1e-6, alternating=False)
        self.merger = Merger(vision, build, after=False)
        self.levels = nn.ModuleList(Merger(vision, build, after=True) for _ in vision.levels)

    def _place(self, grid: Grid, device: torch.device) -> Placed:
        """Return learned positions [patches, hidden] and the two axes of rotation, row first."""
        spec = self._spec
        row, column = places(grid.frames, grid.rows, grid.columns, spec.media.merge, device)
        learned = interpolated(
            self.positions,
            linear_taps(row, grid.rows, spec.side, self._wide),
            linear_taps(column, grid.columns, spec.side, self._wide),
            self._wide,
        )
        return Placed(learned, (row, column))

    def _merge(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        result: Tensor = self.merger(x)
        return result
