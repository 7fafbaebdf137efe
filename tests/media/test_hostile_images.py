"""Small files with an expensive decode end within limits and harm no other client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from PIL import Image

from tests.support.pictures import FACTS, image_file
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest, Overloaded
from weft.common.workers import most_of_client
from weft.config.sections.media_section import MediaSection
from weft.media import media_worker, service
from weft.media.decode import pixels_of
from weft.media.headers import read_header
from weft.media.media_errors import BadMedia
from weft.media.media_messages import Target
from weft.media.pictures import Frame, Picture, Pictures
from weft.media.service import MediaService

WHERE = "messages[0].content[1]"
TARGET = Target(height=64, width=64, canvas=(64, 64), resample=3, fingerprint=b"")
SIDE = 8191


def run(work: Callable[[MediaService], Coroutine[Any, Any, None]], **fields: Any) -> None:
    async def main() -> None:
        made = MediaService(MediaSection(**fields), per_client=True)
        try:
            await work(made)
        finally:
            await made.close()

    asyncio.run(asyncio.wait_for(main(), deadline(120)))


def picture(file: bytes) -> Picture:
    frame = Frame(where=WHERE, header=read_header(file), data=memoryview(file))
    return Pictures(FACTS, MediaSection()).fitted(frame)[0]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(side: int, *more: bytes, interlaced: int = 0) -> bytes:
    """Black, at one bit a pixel, with more chunks before the pixels."""
    rows = (side + 7) // 8 + 1
    size = rows * side if not interlaced else 2 * rows * side
    body = chunk(b"IDAT", zlib.compress(bytes(size), 9)) + chunk(b"IEND", b"")
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + body


def bmp_rle(side: int) -> bytes:
    """Return a BMP with one run per pixel, which Pillow decodes slowly in Python."""
    data = b"\x01\x00" * (side * side) + b"\x00\x01"
    offset = 14 + 40 + 1024
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset) + head + bytes(1024) + data


def gif(side: int) -> bytes:
    """Return a GIF with a small screen, a large image and few codes."""
    file = io.BytesIO()
    Image.new("P", (side, side)).save(file, "GIF")
    data = bytearray(file.getvalue())
    data[6:10] = struct.pack("<HH", 1, 1)
    return bytes(data)


def exif(entries: int, size: int) -> bytes:
    """Return a JPEG with ``entries`` metadata tags that all refer to the same ``size`` bytes."""
    tags = b"".join(struct.pack("<HHII", 0x9000 + n, 7, size, 8) for n in range(entries))
    tiff = b"II*\0" + struct.pack("<IH", 8, entries) + tags + bytes(4)
    part = b"Exif\0\0" + tiff + bytes(max(0, size - len(tiff)))
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "JPEG")
    plain = file.getvalue()
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part + plain[20:]


BOMB = zlib.compress(bytes(64 << 20), 9)
SMALL = {
    "text of a PNG": png(9, *[chunk(b"zTXt", b"a\0\0" + BOMB)] * 4),
    "profile of a PNG": png(9, chunk(b"iCCP", b"a\0\0" + BOMB)),
    "international text of a PNG": png(9, chunk(b"iTXt", b"a\0\1\0\0\0" + BOMB)),
    "interlaced PNG": png(2047, interlaced=1),
    "header of a WebP": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f"
    + struct.pack("<I", 7999 | 7999 << 14)
    + bytes(8)
    + b"\0",
    "GIF": gif(2048),
    "RLE of a BMP": bmp_rle(256),
    "metadata of a JPEG": exif(4000, 60_000),
}


@pytest.mark.requirement("F23")
@pytest.mark.parametrize("name", SMALL)
def test_small_files_are_read_or_refused_soon(name: str) -> None:
    began = time.process_time()
    with contextlib.suppress(BadMedia):
        header = read_header(SMALL[name])
        assert len(pixels_of(SMALL[name], header, TARGET)) == 64 * 64 * 3
    assert time.process_time() - began < deadline(4)


@pytest.mark.slow
@pytest.mark.parametrize("interlaced", [0, 1])
def test_the_largest_image_passes(interlaced: int) -> None:
    """Within the CPU time of a decoder."""

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            (item,) = await media.decode([picture(png(SIDE, interlaced=interlaced))], {}, lease)
            assert item.pixels

    run(work)


@pytest.mark.requirement("F23")
def test_a_decode_that_takes_too_much_cpu_time_is_that_images_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CPU_S", 0.1)

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            with pytest.raises(InvalidRequest, match=r"0\.1 seconds of CPU time.*send a smaller") as caught:
                await media.decode([picture(bmp_rle(1500))], {}, lease)
            assert caught.value.param == WHERE
            assert caught.value.error_code == "image_too_large"
            (item,) = await media.decode([picture(image_file())], {}, lease)
            assert item.pixels

    run(work)


@pytest.mark.requirement("F23")
def test_a_flood_of_one_client_leaves_a_decoder_to_others() -> None:
    async def work(media: MediaService) -> None:
        with media.memory.lease(0) as first, media.memory.lease(1) as second:
            large = [picture(png(2500)) for _ in range(6)]
            flood = asyncio.ensure_future(media.decode(large, {}, first, 0))
            await asyncio.sleep(0)
            await media.decode([picture(image_file())], {}, second, 1)
            assert not flood.done()
            await flood

    run(work)


def test_a_long_decode_steps_back() -> None:
    def long() -> int:
        until = time.monotonic() + deadline(10)
        thread = threading.get_native_id()
        while os.getpriority(os.PRIO_PROCESS, thread) != 19 and time.monotonic() < until:
            time.sleep(0.005)
        return os.getpriority(os.PRIO_PROCESS, thread)

    assert media_worker._lowering_priority(long) == 19
    assert media_worker._lowering_priority(lambda: os.getpriority(os.PRIO_PROCESS, 0)) < 19


@pytest.mark.requirement("F23")
def test_memory_is_shared_by_clients() -> None:
    """Only the client that exceeds its share is refused."""

    async def work(media: MediaService) -> None:
        memory = media.memory
        with memory.lease(1) as first, memory.lease(1) as more, memory.lease(2) as second:
            first.take(500_000)
            with pytest.raises(Overloaded):
                more.take(100_000)
            second.take(200_000)
            with pytest.raises(Overloaded):
                second.take(200_000)
            first.give(400_000)
            second.take(200_000)
            with pytest.raises(InvalidRequest, match="media-memory"):
                more.take(1 << 20)
        assert memory.used == 0

    run(work, media_memory=1 << 20)


def test_one_place_is_left() -> None:
    assert [most_of_client(most) for most in (1, 2, 8)] == [1, 1, 7]


def jpeg(**options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 48)).save(file, "JPEG", **options)
    return file.getvalue()


def test_marks_inside_of_other_parts_are_no_scans() -> None:
    for file, scans in ((jpeg(), 1), (jpeg(progressive=True), 10)):
        start = file.index(b"\xff\xda")
        comment = b"\xff\xfe" + struct.pack(">H", 2 + 600) + b"\xff\xda\0\x02ab" * 100
        for data in (
            file[:start] + comment + file[start:],
            file[:-2] + comment + file[-2:],
            file + 200 * b"\xff\xda\0\x02",
        ):
            assert read_header(data).scans == scans
            pixels_of(data, read_header(data), TARGET)


def test_scans_do_not_hide_behind_marks_without_a_length() -> None:
    """Covers restart marks between rows, fill bytes, junk bytes, and marks that decoders skip."""
    file = jpeg(progressive=True)
    scan = file[file.rindex(b"\xff\xda") : -2]
    for hiding in (b"\xff\xd3", b"\xff\xff\xff", b"abc", b"\xff\x01\xff\xff", b"\xff\x02\xff\xff", b"\xff\0"):
        with pytest.raises(BadMedia, match="scans"):
            read_header(file[:-2] + 120 * (hiding + scan) + file[-2:])
