"""Tokens of an image that attend to later tokens of the image: every backend against a plain reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention.test_torch_backend import Scene
from tests.attention.test_triton_backend import BOTH, DEVICE, moved, runs
from tests.support.slow import mostly_slow
from weft.attention.gqa.cpu_backend import CpuAttention
from weft.attention.gqa.invariant_backend import InvariantAttention
from weft.attention.gqa.torch_backend import TILE, TorchAttention
from weft.common.errors import ConfigError
from weft.config.resolved import KVConfig, MediaLimits
from weft.config.sections.all import SchedulerSection
from weft.config.sizing.media_limits import check_whole_images
from weft.runner.images.visible_ends import ImagesOfRow, ends_of

Tensor = torch.Tensor
CPU = torch.device("cpu")
#: (start, count) of rows, and the images of each row: in the middle, at both ends, cut by a prefix hit, none.
ROWS = [(5, 19), (0, 12), (30, 9), (17, 1), (3, 4)]
IMAGES: list[list[tuple[int, int]]] = [[(8, 9), (19, 3)], [(0, 5), (8, 4)], [(24, 11)], [], []]
#: Longer than the tiles of the backends.
LONG = [(700, 330), (0, TILE + 70)]
LONG_IMAGES: list[list[tuple[int, int]]] = [[(690, 100), (800, 220)], [(3, TILE + 20)]]


class Ahead(Scene):
    """A scene with images."""

    def __init__(self, rows: list[tuple[int, int]], images: list[list[tuple[int, int]]], **more: Any) -> None:
        super().__init__(rows, **more)
        each = [
            ImagesOfRow(start, start + count, own) for (start, count), own in zip(rows, images, strict=True)
        ]
        self.ends = ends_of(each, (0,), 1, CPU)
        self.segment = replace(self.segment, ends=self.ends)

    def attend(self, backend: Any) -> Tensor:
        out = torch.full_like(self.q, float("nan"))
        backend.attend(self.q, out, self.core(), 0, self.spec)
        return out

    def expected(self) -> Tensor:
        """Return the expected output in float64, row by row."""
        made, token, shared = [], 0, self.heads // self.spec.kv_heads
        for (start, count), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            k, v = (x.double().repeat_interleave(shared, dim=1).transpose(0, 1) for x in (keys, values))
            queries = torch.arange(start, start + count)[:, None]
            at = torch.arange(start + count)[None]
            seen = (at <= queries) | (at < self.ends[0].cpu()[token : token + count, None])
            if self.window:
                seen &= at > queries - self.window
            q = self.q[token : token + count].cpu().double().transpose(0, 1)
            scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(~seen, -torch.inf)
            made.append((scores.softmax(-1) @ v).transpose(0, 1))
            token += count
        return torch.cat(made)


def test_ends_of_rows() -> None:
    (ends,) = Ahead(ROWS, IMAGES).ends
    assert ends[:5].tolist() == [0, 0, 0, 17, 17]
    assert ends[19 + 12 : 19 + 12 + 6].tolist() == [35, 35, 35, 35, 35, 0]
    cut = ends_of([ImagesOfRow(2, 6, [(4, 9)])], (1,), 2, CPU)
    assert cut[0] is None
    assert cut[1] is not None
    assert cut[1].tolist() == [0, 0, 6, 6], "no end lies behind the row"
    assert ends_of([ImagesOfRow(2, 6, [])], (0,), 1, CPU) == ()
    assert ends_of([ImagesOfRow(2, 6, [(3, 2)])], (), 1, CPU) == ()


@mostly_slow("window", [0, 1, 4, 7, 100], [0, 4])
@mostly_slow("block", [1, 4, 16], [4])
@pytest.mark.parametrize("backend", [TorchAttention, InvariantAttention])
def test_torch_backends(backend: Any, block: int, window: int) -> None:
    scene = Ahead(ROWS, IMAGES, window=window, block=block)
    assert torch.allclose(scene.attend(backend()), scene.expected(), rtol=1e-12, atol=1e-12)


@mostly_slow("window", [0, 150], [150])
@pytest.mark.parametrize("backend", [TorchAttention, InvariantAttention])
def test_long_images(backend: Any, window: int) -> None:
    scene = Ahead(LONG, LONG_IMAGES, window=window, block=16, heads=2, kv_heads=1, dim=4)
    assert torch.allclose(scene.attend(backend()), scene.expected(), rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("extension")
@mostly_slow("window", [0, 6, 150], [6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_cpu_backend(dtype: torch.dtype, tolerance: float, window: int) -> None:
    for rows, images in ((ROWS, IMAGES), (LONG, LONG_IMAGES)):
        scene = Ahead(rows, images, window=window, block=16, heads=6, kv_heads=2, dim=32, dtype=dtype)
        assert (scene.attend(CpuAttention()).double() - scene.expected()).abs().max() < tolerance


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("window", [0, 150])
def test_bits_do_not_depend_on_the_chunk(window: int) -> None:
    """A chunk that begins within an image, behind a prefix hit, gives the bits of the whole prompt."""
    whole = Ahead([(0, 330)], [[(90, 200)]], window=window, block=16, dim=32, dtype=torch.bfloat16)
    expected = whole.attend(CpuAttention())
    part = Ahead([(130, 200)], [[(90, 200)]], window=window, block=16, dim=32, dtype=torch.bfloat16)
    part.q, part.cache = whole.q[130:], whole.cache
    part.segment = replace(part.segment, tables=whole.segment.tables)
    assert torch.equal(part.attend(CpuAttention()), expected[130:])


@pytest.mark.usefixtures("extension")
def test_ends_outside_the_row_are_refused() -> None:
    scene = Ahead([(3, 4)], [[(4, 2)]], dim=16, dtype=torch.float32)
    for wrong in ([0, 8, 8, 0], [7, 6, 0, 0]):
        scene.segment = replace(scene.segment, ends=(torch.tensor(wrong),))
        if wrong[0]:
            scene.segment = replace(scene.segment, ends=(torch.tensor([7, 0, 0, 0]),))
        with pytest.raises(RuntimeError, match="sees keys up to"):
            scene.attend(CpuAttention())


@runs
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("backend", BOTH)
def test_triton_backends(backend: Any, window: int) -> None:
    rows, images = [(5, 19), (30, 9), (17, 1)], [IMAGES[0], IMAGES[2], []]
    scene = Ahead(rows, images, window=window, block=16, heads=2, kv_heads=1, dim=16, dtype=torch.float32)
    moved(scene, DEVICE)
    scene.segment = replace(
        scene.segment, ends=tuple(one.to(DEVICE) for one in scene.ends if one is not None)
    )
    made = scene.attend(backend())
    assert (made.cpu().double() - scene.expected()).abs().max() < 1e-5


def test_flashinfer_is_refused() -> None:
    limits = MediaLimits(
        patch=4, merge=2, row_bytes=8, cache_bytes=1 << 20, encode_patches=64, most_items=4, whole=9
    )
    kv = KVConfig(pools=(), block_size=8, enable_prefix_caching=False, max_model_len=64, num_slots=4)
    with pytest.raises(ConfigError, match="'flashinfer' does not let tokens of an image"):
        check_whole_images(limits, SchedulerSection(), kv, "flashinfer")
