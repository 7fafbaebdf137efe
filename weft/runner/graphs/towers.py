"""Images encoded by CUDA graphs: one launch replaces the hundreds of launches of a vision tower.

A tower has no state and reads nothing but pixels, so the encoding of an image is a function of the pixels,
and the calls follow from the shape of the image. Each graph is for one exact shape, without padding: a replay
makes the calls of the tower alone. A shape is captured when it occurs the second time.

    pixels    uint8, the image in the first bytes: the only input
    rows      [1 + levels, CAPTURED_TOKENS, width]: the output of every graph, copied behind each replay

The stream orders everything: the copy of the pixels, the replay, and the copy of the rows. Graphs are never
dropped, because a dropped graph could still run. So the number of graphs and their memory have limits, and
further shapes are encoded op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from weft.common.log import get_logger
from weft.common.recent import Recent
from weft.config.resolved import MediaLimits
from weft.config.sizing.memory import CAPTURED_GROWTH, CAPTURED_PATCHES, CAPTURED_TOKENS
from weft.models.vision.base import Embedding, Tower
from weft.ops.cpu import CannotCapture
from weft.runner.graphs.graphs import MORE_MEMORY, Capture

log = get_logger(__name__)

Tensor = torch.Tensor

MOST_GRAPHS = 16
"""Captured shapes per runner. Towers that take tiles need one."""
MOST_SEEN = 256
"""Shapes that are remembered after their first image."""

Shape: TypeAlias = tuple[int, ...]


class _Captured(NamedTuple):
    replay: Callable[[], None]
    rows: int


T = TypeVar("T", Tower, Tower | None)


def captured_tower(tower: T, limits: MediaLimits | None, capture: Capture | None) -> T | CapturedTower:
    """Return ``tower`` with captures on a GPU. Return ``tower`` itself on a CPU, without ``capture`` or
    ``limits``, and if the tower needs the host."""
    if tower is None or capture is None or limits is None or not tower.capturable:
        return tower
    on_gpu = next(tower.parameters()).device.type != "cpu"
    return CapturedTower(tower, capture, limits.patch) if on_gpu else tower


class CapturedTower:
    """A tower that replays the shapes that repeat. Used from the thread of the runner only."""

    def __init__(self, tower: Tower, capture: Capture, patch: int) -> None:
        """``patch``: pixels on a side of a patch."""
        self.replayed = 0
        """Number of replays."""
        self._tower, self._capture = tower, capture
        device = next(tower.parameters()).device
        self._pixels = torch.empty(3 * CAPTURED_PATCHES * patch**2, dtype=torch.uint8, device=device)
        self._rows: Tensor | None = None
        """[1 + levels, CAPTURED_TOKENS, width], made with the first image that may be captured."""
        self._largest, self._room = 0, 3 * CAPTURED_GROWTH * patch**2
        """Bytes of pixels: of the largest captured image; and how much larger images may take new memory."""
        self._graphs: dict[Shape, _Captured] = {}
        self._seen: Recent[Shape, bool] = Recent(MOST_SEEN)
        self._works = True

    def embed(self, image: Tensor) -> Embedding:
        """Return ``Tower.embed``, by a replay if the shape of the image is captured."""
        shape = tuple(image.shape)
        captured = self._graphs.get(shape)
        if captured is None:
            return self._uncaptured(image, shape)
        self._fill(image)
        captured.replay()
        self.replayed += 1
        return self._made(captured.rows)

    def embed_batch(self, images: Sequence[Tensor]) -> list[Embedding]:
        """Return ``Tower.embed_batch``. Images that the tower encodes together are encoded op by op."""
        if self._tower.joins and len(images) > 1:
            return self._tower.embed_batch(images)
        return [self.embed(image) for image in images]

    def _uncaptured(self, image: Tensor, shape: Shape) -> Embedding:
        """Encode an image without a graph, and capture its shape if the shape repeats."""
        if shape in self._seen and self._works and self._has_memory(image):
            rows = self._try(image, shape)
            if rows:
                return self._made(rows)
        made = self._tower.embed(image)  # raises for a wrong image, which is then not remembered
        fits = image.numel() <= len(self._pixels) and len(made.main) <= CAPTURED_TOKENS
        if fits and self._works:
            self._seen.put(shape, True)
            if self._rows is None:
                levels = 0 if made.levels is None else len(made.levels)
                try:
                    self._rows = made.main.new_empty(1 + levels, CAPTURED_TOKENS, made.main.shape[1])
                except RuntimeError as error:
                    self._give_up(error)
        return made

    def _has_memory(self, image: Tensor) -> bool:
        """Return True if ``image`` may be captured. The graphs share memory, but a larger image needs new
        memory. Clients choose sizes, so the sum of the new memory has a limit."""
        fits = image.numel() <= self._largest or image.numel() <= self._room
        return fits and len(self._graphs) < MOST_GRAPHS

    def _took_memory(self, image: Tensor) -> None:
        """Count the memory of a new graph."""
        if image.numel() > self._largest:
            self._room -= image.numel()
            # A tower may join the frames of a group: a video then needs no more memory than one frame.
            self._largest = max(self._largest, image.numel() // len(image))

    def _try(self, image: Tensor, shape: Shape) -> int:
        """Encode ``image`` into the rows and capture the work. Return the number of rows. If the capture
        fails, log a warning, return 0 and capture nothing more."""
        self._fill(image)
        pixels = self._pixels[: image.numel()].view(shape)
        count = 0

        def run() -> None:
            nonlocal count
            made, rows = self._tower.embed(pixels), self._rows
            assert rows is not None
            count = len(made.main)
            rows[0, :count].copy_(made.main)
            if made.levels is not None:
                rows[1:, :count].copy_(made.levels)

        try:
            self._graphs[shape] = _Captured(self._capture(run), count)
        except (CannotCapture, RuntimeError) as error:
            self._give_up(error)
            return 0
        self._took_memory(image)
        return count

    def _give_up(self, error: Exception) -> None:
        """Capture nothing more: log a warning with the error. Captured shapes are still replayed."""
        log.warning("images are encoded op by op, and not as CUDA graphs: %s; %s", error, MORE_MEMORY)
        self._works = False

    def _fill(self, image: Tensor) -> None:
        self._pixels[: image.numel()].copy_(image.reshape(-1))

    def _made(self, rows: int) -> Embedding:
        """Return a copy of the first rows: the next replay writes the rows again."""
        assert self._rows is not None
        own = self._rows[:, :rows].clone()
        return Embedding(main=own[0], levels=own[1:] if len(own) > 1 else None)
