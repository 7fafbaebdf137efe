"""Pixels equal the reference processor's; damaged and oversized files fail with a name."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from weft.media import decode
from weft.media.decode import key_of, pixels_of
from weft.media.headers import read_header
from weft.media.media_errors import BadMedia
from weft.media.media_messages import Target

BICUBIC = 3


def picture(size: tuple[int, int], mode: str = "RGB", seed: int = 1) -> Image.Image:
    """Smooth shapes with some noise."""
    rows, columns = np.mgrid[0 : size[1], 0 : size[0]]
    noise = np.random.default_rng(seed).integers(0, 40, (size[1], size[0], 4))
    waves = np.stack([128 + 80 * np.sin(rows / (3 + n) + columns / (5 + n)) for n in range(4)], -1)
    return Image.fromarray((waves + noise).clip(0, 255).astype(np.uint8), "RGBA").convert(mode)


def file_of(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def target(height: int, width: int, **more: Any) -> Target:
    given = {"canvas": (height, width), "resample": BICUBIC, "fingerprint": b"x", **more}
    return Target(height=height, width=width, **given)


def decoded(data: bytes, wanted: Target) -> np.ndarray:
    pixels = pixels_of(data, read_header(data), wanted)
    return np.frombuffer(pixels, np.uint8).reshape(*wanted.canvas, 3)


@pytest.mark.parametrize(
    ("format", "mode", "options"),
    [
        ("JPEG", "RGB", {"quality": 90}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "LA", {}),
        ("PNG", "P", {"transparency": 3}),
        ("PNG", "1", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
    ],
)
@pytest.mark.parametrize("size", [(64, 64), (101, 37), (300, 500)])
def test_pixels_are_those_of_the_reference(
    format: str, mode: str, options: dict[str, Any], size: tuple[int, int]
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
        smart_resize,
    )

    data = file_of(picture(size, mode), format, **options)
    patch, merge = 16, 2
    least, most = 64 * 64, 320 * 320
    reference = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=merge,
        size={"shortest_edge": least, "longest_edge": most},
        do_rescale=False,
        do_normalize=False,
    )
    made = reference.preprocess([Image.open(io.BytesIO(data))], return_tensors="np")
    height, width = smart_resize(size[1], size[0], patch * merge, least, most)
    assert made["image_grid_thw"].tolist() == [[1, height // patch, width // patch]]
    pixels = decoded(data, target(height, width))
    patches, _, _ = reference.patchify(np.moveaxis(pixels, -1, 0), patch, merge, 2)
    np.testing.assert_array_equal(patches, made["pixel_values"])


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_upright(turn: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = turn
    data = file_of(picture((40, 24)), "PNG", exif=exif)
    header = read_header(data)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert header.shown == (wanted.size[1], wanted.size[0])
    np.testing.assert_array_equal(decoded(data, target(*header.shown)), np.asarray(wanted.convert("RGB")))


def test_the_rest_of_a_canvas_is_black() -> None:
    data = file_of(Image.new("RGB", (10, 10), "white"), "PNG")
    found = decoded(data, target(20, 12, canvas=(28, 28)))
    assert (found[:20, :12] == 255).all()
    assert not found[20:].any()
    assert not found[:, 12:].any()


@pytest.mark.requirement("F24")
def test_a_key_covers_pixels_shape_and_processing() -> None:
    pixels = bytes(range(192))
    keys = [
        key_of(pixels, target(8, 8)),
        key_of(pixels, target(4, 16)),
        key_of(pixels, target(8, 8, fingerprint=b"y")),
        key_of(bytes(192), target(8, 8)),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 16 for key in keys)
    assert key_of(memoryview(pixels), target(8, 8)) == keys[0]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_files_that_are_cut_off(format: str) -> None:
    data = file_of(picture((200, 150)), format)
    header = read_header(data)
    for cut in (len(data) // 3, len(data) * 2 // 3):
        with pytest.raises(BadMedia):
            pixels_of(data[:cut], header, target(32, 32))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_changed_files_give_pixels_or_a_named_error(format: str) -> None:
    data = file_of(picture((60, 50)), format)
    seed = random.Random(7)
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(seed.randint(1, 20)):
            changed[seed.randrange(len(changed))] = seed.randrange(256)
        try:
            header = read_header(bytes(changed))
            if header.width * header.height > 1 << 20:
                continue
            assert len(pixels_of(bytes(changed), header, target(32, 32))) == 32 * 32 * 3
        except BadMedia:
            continue


def test_a_size_that_the_header_does_not_have() -> None:
    data = file_of(picture((60, 50)), "PNG")
    other = read_header(file_of(picture((50, 60)), "PNG"))
    with pytest.raises(BadMedia, match="two different sizes"):
        pixels_of(data, other, target(32, 32))


def test_a_file_of_another_format_is_not_opened() -> None:
    """The header decides the reader."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 50\n%%EndComments\n"
    for data in (eps, file_of(picture((60, 50)), "TIFF")):
        for format in ("PNG", "JPEG"):
            with pytest.raises(BadMedia):
                pixels_of(data, read_header(file_of(picture((60, 50)), format)), target(32, 32))


def test_compressed_text_of_a_png_is_not_expanded() -> None:
    data = file_of(picture((8, 8)), "PNG")
    bomb = b"x\0\0" + zlib.compress(bytes(200 << 20))
    chunk = struct.pack(">I", len(bomb)) + b"zTXt" + bomb + struct.pack(">I", zlib.crc32(b"zTXt" + bomb))
    with pytest.raises(BadMedia):
        pixels_of(data[:33] + chunk + data[33:], read_header(data), target(32, 32))


def test_nothing_imports_pillow_before_it_is_needed() -> None:
    modules = "weft.media.decode, weft.media.media_worker, weft.media.media_messages"
    code = f"import sys, {modules}; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_pillow_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(picture((8, 8)), "PNG")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BadMedia, match=r"weft\[vision\]"):
        pixels_of(data, read_header(data), target(32, 32))
    assert decode.KEY_BYTES == 16
