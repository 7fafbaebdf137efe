"""What the runner sees of a vision tower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from weft.config.media import MediaFacts

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """An image as a text model reads it: a row for each of its tokens."""

    main: Tensor
    """[rows, hidden] in the model's dtype: what stands in place of the tokens' embeddings."""
    levels: Tensor | None = None
    """[n, rows, hidden]: what is added to the stream behind layers 0 .. n - 1 (deepstack)."""


class Tower(nn.Module, ABC):
    """A vision tower on one rank, whole. It holds no state between images."""

    @abstractmethod
    def embed(self, image: Tensor) -> Embedding:
        """One image: uint8 [frames, height, width, 3] on the tower's device, of whole tokens in size.

        Its bits depend on the image alone: no other one is computed with it. Must be called in inference
        mode. Raises ValueError for an image of other sizes, or too many frames.
        """


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
    _check(image, media)
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
