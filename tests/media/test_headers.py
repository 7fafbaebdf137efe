"""Headers give Pillow's values; no client input takes long or fails without a name."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import time
import zlib
from typing import Any

import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.support.slowness import deadline
from weft.media.headers import ImageHeader, read_header
from weft.media.media_errors import BadMedia

SIZES = [(1, 1), (7, 5), (64, 48), (300, 1000)]
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP"]


def made(format: str, size: tuple[int, int] = (7, 5), mode: str = "RGB", **options: Any) -> bytes:
    image = Image.new(mode, size, 77 if mode in ("L", "P", "1") else None)
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def shown(data: bytes) -> tuple[int, int]:
    """Return (height, width) after Pillow applies the orientation."""
    with Image.open(io.BytesIO(data)) as image:
        width, height = ImageOps.exif_transpose(image).size
        return height, width


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_format_and_size(format: str, size: tuple[int, int]) -> None:
    found = read_header(made(format, size))
    assert found == ImageHeader(format=format, width=size[0], height=size[1])  # type: ignore[arg-type]
    assert read_header(memoryview(made(format, size))) == found


@pytest.mark.parametrize(
    ("format", "mode", "options"),
    [
        ("JPEG", "CMYK", {}),
        ("JPEG", "L", {"progressive": True}),
        ("PNG", "RGBA", {"optimize": True}),
        ("PNG", "P", {}),
        ("PNG", "I;16", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGB", {"icc_profile": b"x" * 200}),
        ("GIF", "P", {"comment": b"hello" * 99, "interlace": 1}),
        ("BMP", "1", {}),
    ],
)
def test_kinds_of_files(format: str, mode: str, options: dict[str, Any]) -> None:
    data = made(format, (33, 21), mode, **options)
    assert read_header(data).shown == shown(data) == (21, 33)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_orientation(format: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0110] = "a camera"
    exif[0x0112] = turn
    for size in ((33, 21), (5, 8)):
        data = made(format, size, exif=exif)
        assert read_header(data).orientation == turn
        assert read_header(data).shown == shown(data)


@pytest.mark.parametrize("text", ['<x tiff:Orientation="6"/>', "<tiff:Orientation>6</tiff:Orientation>"])
def test_orientation_in_xmp(text: str) -> None:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", text)
    files = [
        made("PNG", (33, 21), pnginfo=info),
        made("JPEG", (33, 21), xmp=text.encode()),
        made("WEBP", (33, 21), xmp=text.encode()),
    ]
    for data in files:
        assert read_header(data).shown == shown(data) == (33, 21)


def test_big_endian_and_damaged_exif() -> None:
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, 8, 0)
    good = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4)
    plain = made("JPEG", (33, 21))

    def with_exif(exif: bytes) -> bytes:
        return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + plain[2:]

    assert read_header(with_exif(good)).shown == shown(with_exif(good)) == (33, 21)
    for cut in range(6, len(good) - 6):
        assert read_header(with_exif(good[:cut])).shown == (21, 33)


def test_animations_are_refused() -> None:
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        frames[0].save(file, format, save_all=True, append_images=frames[1:])
        with pytest.raises(BadMedia, match="several frames"):
            read_header(file.getvalue())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n",
        b"II*\0\x08\0\0\0" + bytes(64),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\x80\x04\x95pickle",
        b"\0\0\0 ftypavif" + bytes(64),
        b"%PDF-1.7",
        b"P6 5 5 255 " + bytes(75),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xda\0\x02",
        b"GIF89a" + struct.pack("<HHBBB", 5, 5, 0, 0, 0) + b";",
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 0, 5) + bytes(20),
        b"RIFF\0\0\0\0WEBP",
        b"BM" + bytes(60),
    ],
)
def test_everything_else_is_refused(data: bytes) -> None:
    with pytest.raises(BadMedia):
        read_header(data)


@pytest.mark.parametrize("format", FORMATS)
def test_cut_and_changed_files_fail_in_no_other_way(format: str) -> None:
    data = made(format, (40, 30), exif=Image.Exif()) if format != "BMP" else made(format, (40, 30))
    seed = random.Random(5)
    for cut in range(min(len(data), 400)):
        _try(data[:cut])
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(seed.randint(1, 5)):
            changed[seed.randrange(min(len(changed), 200))] = seed.randrange(256)
        _try(bytes(changed))


def _try(data: bytes) -> None:
    with contextlib.suppress(BadMedia):
        assert min(read_header(data).shown) >= 1


def test_no_file_takes_long() -> None:
    size = 8 << 20
    ihdr = struct.pack(">I4sIIBBBBB", 13, b"IHDR", 5, 5, 8, 2, 0, 0, 0) + bytes(4)
    files = [
        b"\xff\xd8" + b"\xff" * size,
        b"\xff\xd8" + b"\xff\x01" * (size // 2),
        b"\x89PNG\r\n\x1a\n" + ihdr + struct.pack(">I4sI", 0, b"tEXt", 0) * (size // 12),
        b"RIFF\0\0\0\0WEBP" + struct.pack("<4sI", b"JUNK", 0) * (size // 8),
        b"GIF89a" + struct.pack("<HHBBB", 5, 5, 0, 0, 0) + b"\x77" * size,
        b"GIF89a" + struct.pack("<HHBBB", 5, 5, 0, 0, 0) + b"!\xfe" + b"\x01a" * (size // 2),
    ]
    for data in files:
        began = time.monotonic()
        with pytest.raises(BadMedia):
            read_header(data)
        assert time.monotonic() - began < deadline(2)


def test_a_huge_png_is_known_to_be_huge_before_it_is_decoded() -> None:
    """50,000 x 50,000 pixels in a few kilobytes."""
    rows = zlib.compress(bytes(1 << 16))
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, part in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")):
        data += struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
    assert read_header(data).shown == (50_000, 50_000)


def test_scans_of_a_jpeg_are_counted_and_bounded() -> None:
    assert read_header(made("JPEG", (64, 48))).scans == 1
    file = made("JPEG", (64, 48), progressive=True)
    found = read_header(file)
    assert 2 < found.scans < 20
    assert found.work == 64 * 48 * found.scans
    scan = file[file.rindex(b"\xff\xda") : -2]
    with pytest.raises(BadMedia, match="scans"):
        read_header(file[:-2] + 2000 * scan + file[-2:])
