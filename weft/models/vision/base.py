"""What the runner sees of a vision tower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from weft.config.media import MediaFacts
from weft.config.spec import VisionSpec
from weft.layers.build import Build
from weft.layers.linear import Linear
from weft.models.vision.layers import PatchBlock

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """An image as a text model reads it: a row for each of its tokens."""

    main: Tensor
    """[rows, hidden] in the model's dtype: what stands in place of the tokens' embeddings."""
    levels: Tensor | None = None
    """[n, rows, hidden]: what is added to the stream behind layers 0 .. n - 1 (deepstack)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The patches of an image."""

    frames: int
    """Frame groups."""
    rows: int
    columns: int

    @property
    def count(self) -> int:
        return self.frames * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the patches of an image are, [N] of them."""

    learned: Tensor
    """[N, hidden], wide: what is added to them."""
    axes: tuple[Tensor, Tensor]
    """int64 [N] each: what ``axial_angles`` turns by."""


class Tower(nn.Module, ABC):
    """A vision tower on one rank, whole. It holds no state between images.

    Images are encoded together as one row of patches: matrices go over all of them, attention over the
    patches of one group of one image.
    """

    def __init__(self, vision: VisionSpec, build: Build, *, eps: float, alternating: bool) -> None:
        """``eps``: of the blocks' norms; ``alternating``: see ``axial_angles``."""
        super().__init__()
        media = vision.media
        self._spec = vision
        self._wide = build.wide
        self._alternating = alternating
        self._colours = colour_table(media, build.dtype, build.device)
        self.patch = Linear(3 * media.temporal * media.patch**2, vision.hidden, build, bias=True)
        self.positions = build.weight(vision.side**2, vision.hidden)
        shape = (vision.hidden, vision.heads, vision.intermediate, vision.activation, eps, build)
        self.blocks = nn.ModuleList(PatchBlock(*shape) for _ in range(vision.layers))
        self.levels = nn.ModuleList()
        """What makes a level of the stream behind each block of ``VisionSpec.levels``."""

    def embed(self, image: Tensor) -> Embedding:
        """One image: uint8 [frames, height, width, 3] on the tower's device, of whole tokens in size.

        Its bits depend on the image alone: no other one is computed with it. Must be called in inference
        mode. Raises ValueError for an image of other sizes, or too many frames.
        """
        return self.embed_batch([image])[0]

    def embed_batch(self, images: Sequence[Tensor]) -> list[Embedding]:
        """Images as ``embed`` takes them, of any sizes, encoded together; an embedding for each, in order.

        The last bits of an embedding may depend on what else is in the batch. Raises as ``embed``, when any
        image is wrong.
        """
        grids = [self._grid(image) for image in images]
        # Groups of one size lie side by side, so that attention takes them in one call.
        order = sorted(range(len(images)), key=lambda number: self._group(grids[number]))
        made = self._embed([images[n] for n in order], [grids[n] for n in order]) if images else []
        result = dict(zip(order, made, strict=True))
        return [result[number] for number in range(len(images))]

    def _embed(self, images: list[Tensor], grids: list[Grid]) -> list[Embedding]:
        x = self.patch(_joined([patches(image, self._spec.media, self._colours) for image in images]))
        placed = [self._place(grid, x.device) for grid in grids]
        x = x + _joined([place.learned for place in placed]).to(x.dtype)
        axes = _joined([place.axes[0] for place in placed]), _joined([place.axes[1] for place in placed])
        dim = self._spec.hidden // self._spec.heads
        angles = axial_angles(axes, dim, self._spec.theta, self._wide, alternating=self._alternating)
        groups = _runs([self._group(grid) for grid in grids for _ in range(grid.count // self._group(grid))])
        levels: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            x = block(x, angles, groups)
            if layer in self._spec.levels:
                levels.append(self.levels[len(levels)](x))
        counts = [self._tokens(grid) for grid in grids]
        main = self._merge(x, grids).split(counts)
        if not levels:
            return [Embedding(main=rows) for rows in main]
        stacked = torch.stack(levels).split(counts, dim=1)
        return [Embedding(main=rows, levels=level) for rows, level in zip(main, stacked, strict=True)]

    def _grid(self, image: Tensor) -> Grid:
        media = self._spec.media
        _check(image, media)
        frames = -(-image.shape[0] // media.temporal)
        return Grid(frames, image.shape[1] // media.patch, image.shape[2] // media.patch)

    def _group(self, grid: Grid) -> int:
        """Patches that attend to each other: a divisor of all, which lie together."""
        return grid.rows * grid.columns

    def _tokens(self, grid: Grid) -> int:
        """Rows of the embedding."""
        return grid.count // self._spec.media.merge**2

    @abstractmethod
    def _place(self, grid: Grid, device: torch.device) -> Placed:
        """Of the patches in the order of ``patches``."""

    @abstractmethod
    def _merge(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The rows of all images, [tokens, output], of the stream behind the blocks [N, hidden]."""


def _joined(parts: list[Tensor]) -> Tensor:
    """One after another; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """(groups, length of each): those of one length that follow one another."""
    return [(len(list(run)), length) for length, run in groupby(lengths)]


def colour_table(media: MediaFacts, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each of 256 values becomes in each colour: [3, 256].

    Rescaled and normalized in float32, as the reference's image processors do it, then rounded to ``dtype``.
    """
    values = torch.arange(256, dtype=torch.float64)
    mean = torch.tensor(media.mean, dtype=torch.float32).unsqueeze(1)
    std = torch.tensor(media.std, dtype=torch.float32).unsqueeze(1)
    if media.kind == "area":
        table = ((values * media.rescale).to(torch.float32) - mean) / std
    else:  # this one's mean and deviation are rescaled, not the pixels
        scale = 1.0 / media.rescale
        table = (values.to(torch.float32) - mean * scale) / (std * scale)
    return table.to(dtype).to(device)


def patches(image: Tensor, media: MediaFacts, colours: Tensor) -> Tensor:
    """The patches of an image, each as one row: [N, 3 * temporal * patch * patch], colour by colour.

    image: as ``Tower.embed`` takes it; colours: ``colour_table``. Kind ``area``: the patches of a token lie
    together; a last group of too few frames repeats its last one. Kind ``patches``: row by row. Equal to
    ``pixel_values`` of the reference's image processors.
    """
    size, merge, group = media.patch, media.merge, media.temporal
    channels = (image[..., c].to(torch.int32).flatten() for c in range(3))
    pixels = torch.stack([colours[c].index_select(0, values) for c, values in enumerate(channels)])
    pixels = pixels.view(3, *image.shape[:3])
    missing = -image.shape[0] % group
    if missing:
        pixels = torch.cat([pixels, pixels[:, -1:].expand(-1, missing, -1, -1)], dim=1)
    frames, height, width = pixels.shape[1] // group, image.shape[1] // size, image.shape[2] // size
    cut = pixels.view(3, frames, group, height, size, width, size)
    if media.kind == "patches":
        return cut.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, 3 * group * size * size)
    cut = cut.view(3, frames, group, height // merge, merge, size, width // merge, merge, size)
    return cut.permute(1, 3, 6, 4, 7, 0, 2, 5, 8).reshape(-1, 3 * group * size * size)


def _check(image: Tensor, media: MediaFacts) -> None:
    token = media.patch * media.merge
    if image.dtype != torch.uint8 or image.dim() != 4 or image.shape[3] != 3 or not image.numel():
        raise ValueError(f"image of {image.dtype} {tuple(image.shape)}, not uint8 [frames, height, width, 3]")
    if image.shape[1] % token or image.shape[2] % token:
        raise ValueError(f"an image of {image.shape[1]} x {image.shape[2]} pixels has no whole tokens")


def places(frames: int, rows: int, columns: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, int64 [N] each: ``block`` x ``block`` of them lie together."""
    row = torch.arange(rows, device=device).view(rows // block, 1, block, 1)
    column = torch.arange(columns, device=device).view(1, columns // block, 1, block)
    shape = (frames, rows // block, columns // block, block, block)
    return row.expand(shape).reshape(-1), column.expand(shape).reshape(-1)


def axial_angles(
    axes: tuple[Tensor, Tensor], dim: int, theta: float, dtype: torch.dtype, *, alternating: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin of patches, [N, dim / 2] in ``dtype`` (wide): half of the pairs turn by each axis.

    axes: int64 [N] each; all pairs of the first come first, or they take turns (``alternating``). Pair i of
    an axis turns by theta^(-4 i / dim) a step. Source: Su et al. 2021, arXiv 2104.09864, for two axes.
    """
    exponents = torch.arange(0, dim // 2, 2, dtype=torch.float64, device=axes[0].device) / (dim // 2)
    frequencies = (theta**-exponents).to(dtype)
    turned = [axis.to(dtype).unsqueeze(1) * frequencies for axis in axes]
    angles = torch.stack(turned, dim=2).flatten(1) if alternating else torch.cat(turned, dim=1)
    return angles.cos(), angles.sin()
