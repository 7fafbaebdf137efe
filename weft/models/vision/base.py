"""Interface between the runner and a vision tower, and the common part of all towers."""

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
from weft.layers.dense import Linear
from weft.models.vision.layers import PatchBlock

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Embedding of an image for a text model: one row per placeholder token."""

    main: Tensor
    """[rows, hidden] in the model's dtype: replaces the embeddings of the tokens."""
    levels: Tensor | None = None
    """[n, rows, hidden]: added to the stream after layers 0 .. n - 1 (deepstack); None without deepstack."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers of patches of an image."""

    frames: int
    """Frame groups."""
    rows: int
    columns: int

    @property
    def count(self) -> int:
        return self.frames * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Placed:
    """Positions of the N patches of an image."""

    learned: Tensor
    """[N, hidden], wide: learned positions, added to the patches."""
    axes: tuple[Tensor, Tensor]
    """int64 [N] each: rotation coordinates for ``axial_angles``."""


class Tower(nn.Module, ABC):
    """A complete vision tower on one rank. A tower keeps no state between images."""

    #: True if the calls of ``embed`` follow from the shape of the image, without a wait for the device.
    capturable: bool = True
    #: True if ``embed_batch`` encodes images together.
    joins: bool = False

    def embed(self, image: Tensor) -> Embedding:
        """Encode one image: uint8 [frames, height, width, 3] on the tower's device, height and width in whole
        tokens.

        The bits of the embedding depend on the image alone, because no other image is in the same call. Call
        in inference mode. Raises ValueError for other sizes or too many frames.
        """
        return self.embed_batch([image])[0]

    @abstractmethod
    def embed_batch(self, images: Sequence[Tensor]) -> list[Embedding]:
        """Encode images of any sizes. Return one embedding per image, in order.

        The last bits of an embedding may depend on the other images of the batch. Raises ValueError, as
        ``embed``, if any image is wrong.
        """


class PatchTower(Tower):
    """A tower of Weft's own layers.

    Images are encoded together as one row of patches: matrices run over all patches, attention over the
    patches of one group of one image.
    """

    joins = True

    def __init__(self, vision: VisionSpec, build: Build, *, eps: float, alternating: bool) -> None:
        """``eps``: epsilon of the norms of blocks. ``alternating``: see ``axial_angles``."""
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
        """Module per entry of ``VisionSpec.levels``: makes a deepstack level from the stream after the
        block."""

    def embed_batch(self, images: Sequence[Tensor]) -> list[Embedding]:
        """Encode images together; see ``Tower.embed_batch``."""
        grids = [self._grid(image) for image in images]
        # Sort by group size: attention takes neighbouring groups of one size in one call.
        order = sorted(range(len(images)), key=lambda number: self._group(grids[number]))
        made = self._embed([images[n] for n in order], [grids[n] for n in order]) if images else []
        result = dict(zip(order, made, strict=True))
        return [result[number] for number in range(len(images))]

    def _embed(self, images: list[Tensor], grids: list[Grid]) -> list[Embedding]:
        """Encode images as one row of patches, in the given order. Return one embedding per image."""
        # [N, hidden]: patches of all images
        x = self.patch(_joined([patches(image, self._spec.media, self._colours) for image in images]))
        placed = [self._place(grid, x.device) for grid in grids]
        x = x + _joined([place.learned for place in placed]).to(x.dtype)
        axes = _joined([place.axes[0] for place in placed]), _joined([place.axes[1] for place in placed])
        del placed  # the wide positions need more memory than the stream
        dim = self._spec.hidden // self._spec.heads
        angles = axial_angles(axes, dim, self._spec.theta, self._wide, alternating=self._alternating)
        # (count, patches) of neighbouring groups with equal numbers of patches
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
        check_image(image, media)
        frames = -(-image.shape[0] // media.temporal)
        return Grid(frames, image.shape[1] // media.patch, image.shape[2] // media.patch)

    def _group(self, grid: Grid) -> int:
        """Return the number of patches in an attention group: a divisor of all patches. A group is
        contiguous."""
        return grid.rows * grid.columns

    def _tokens(self, grid: Grid) -> int:
        """Return the number of embedding rows."""
        return grid.count // self._spec.media.merge**2

    @abstractmethod
    def _place(self, grid: Grid, device: torch.device) -> Placed:
        """Return the positions of the patches, in the order of ``patches``."""

    @abstractmethod
    def _merge(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the rows of all images, [tokens, output], from the stream after the blocks [N, hidden]."""


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate ``parts``; a single part is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """Return (number of groups, length) for each run of neighbouring groups of equal length."""
    return [(len(list(run)), length) for length, run in groupby(lengths)]


def colour_table(media: MediaFacts, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the normalized value of each of 256 pixel values in each colour: [3, 256].

    Rescaled and normalized in float32, like the reference's image processors, then rounded to ``dtype``.
    """
    values = torch.arange(256, dtype=torch.float64)
    mean = torch.tensor(media.mean, dtype=torch.float32).unsqueeze(1)
    std = torch.tensor(media.std, dtype=torch.float32).unsqueeze(1)
    if media.bfloat16:
        narrow = values.to(torch.bfloat16) * media.rescale
        table = (narrow - mean.to(torch.bfloat16)) / std.to(torch.bfloat16)
    elif media.kind == "area":
        table = ((values * media.rescale).to(torch.float32) - mean) / std
    else:  # for this kind the reference rescales mean and deviation, not the pixels
        scale = 1.0 / media.rescale
        table = (values.to(torch.float32) - mean * scale) / (std * scale)
    return table.to(dtype).to(device)


def patches(image: Tensor, media: MediaFacts, colours: Tensor) -> Tensor:
    """Return the patches of an image, one per row: [N, 3 * temporal * patch * patch], colour by colour.

    image: as in ``Tower.embed``; colours: result of ``colour_table``. Kind ``area``: the patches of a token
    are neighbours; an incomplete last frame group repeats its last frame. Kind ``patches``: row by row. The
    result equals ``pixel_values`` of the reference's image processors.
    """
    size, merge, group = media.patch, media.merge, media.temporal
    channels = (image[..., c].to(torch.int32).flatten() for c in range(3))
    pixels = torch.stack([colours[c].index_select(0, values) for c, values in enumerate(channels)])
    pixels = pixels.view(3, *image.shape[:3])
    missing = -image.shape[0] % group
    if missing:
        pixels = torch.cat([pixels, pixels[:, -1:].expand(-1, missing, -1, -1)], dim=1)
    frames, height, width = pixels.shape[1] // group, image.shape[1] // size, image.shape[2] // size
    # [colour, frame group, frame, row, y, column, x]
    cut = pixels.view(3, frames, group, height, size, width, size)
    if media.kind == "patches":
        return cut.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, 3 * group * size * size)
    # The same, with rows and columns of patches split into tokens and patches of a token.
    cut = cut.view(3, frames, group, height // merge, merge, size, width // merge, merge, size)
    return cut.permute(1, 3, 6, 4, 7, 0, 2, 5, 8).reshape(-1, 3 * group * size * size)


def check_image(image: Tensor, media: MediaFacts) -> None:
    """Raise ValueError unless ``image`` is uint8 [frames, height, width, 3] of whole tokens."""
    token = media.patch * media.merge
    if image.dtype != torch.uint8 or image.dim() != 4 or image.shape[3] != 3 or not image.numel():
        raise ValueError(f"image of {image.dtype} {tuple(image.shape)}, not uint8 [frames, height, width, 3]")
    if image.shape[1] % token or image.shape[2] % token:
        raise ValueError(f"an image of {image.shape[1]} x {image.shape[2]} pixels has no whole tokens")


def places(frames: int, rows: int, columns: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and column of each patch, int64 [N] each, in an order of ``block`` x ``block``
    neighbours."""
    row = torch.arange(rows, device=device).view(rows // block, 1, block, 1)
    column = torch.arange(columns, device=device).view(1, columns // block, 1, block)
    shape = (frames, rows // block, columns // block, block, block)
    return row.expand(shape).reshape(-1), column.expand(shape).reshape(-1)


def axial_angles(
    axes: tuple[Tensor, Tensor], dim: int, theta: float, dtype: torch.dtype, *, alternating: bool
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of patches, [N, dim / 2] in ``dtype`` (wide). Half of the pairs rotate by each axis.

    axes: int64 [N] each. Pairs of the first axis come first, or pairs of both axes alternate
    (``alternating``). Pair i of an axis rotates by theta^(-4 i / dim) per step. Source: Su et al. 2021, arXiv
    2104.09864, for two axes.
    """
    exponents = torch.arange(0, dim // 2, 2, dtype=torch.float64, device=axes[0].device) / (dim // 2)
    frequencies = (theta**-exponents).to(dtype)
    turned = [axis.to(dtype).unsqueeze(1) * frequencies for axis in axes]
    angles = torch.stack(turned, dim=2).flatten(1) if alternating else torch.cat(turned, dim=1)
    return angles.cos(), angles.sin()
