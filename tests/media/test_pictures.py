"""Images are checked and counted by their headers before any fetch or decode."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec
import pytest

from tests.support.pictures import FACTS, data_url, image_file
from weft.common.errors import InvalidRequest
from weft.config.sections.media_section import MediaSection
from weft.media.headers import ImageHeader, read_header
from weft.media.pictures import LOW_PIXELS, NeedsFiles, Pictures
from weft.text.images import ImagePart

SECTION = MediaSection(
    max_image_bytes=1 << 20, max_image_pixels=1 << 20, allowed_media_domains=("example.org",)
)


def part(source: Any, detail: Any = "auto") -> ImagePart:
    return ImagePart(source, "messages[0].content[1]", detail)


def refused(pictures: Pictures, source: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        pictures.measured([part(source)], {})
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.message.startswith("messages[0].content[1]: ")
    return caught.value


def test_an_image_is_counted_by_its_header() -> None:
    pictures = Pictures(FACTS, SECTION)
    file = image_file((64, 48))
    (found,) = pictures.measured([part(data_url(file))], {})
    fit = FACTS.grid_of(48, 64)
    assert (found.grid, found.count, found.target.canvas) == (fit.grid, fit.tokens, fit.padded)
    (frame,) = found.frames
    assert frame.header == read_header(file)
    assert bytes(frame.data) == file
    assert found.nbytes == fit.padded[0] * fit.padded[1] * 3
    # The value travels from the process that reads requests.
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=type(found))
    assert again == found


@pytest.mark.requirement("F23")
def test_a_huge_image_is_refused_by_its_header() -> None:
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    error = refused(Pictures(FACTS, SECTION), data_url(file))
    assert error.error_code == "image_too_large"
    assert "50000 x 50000 pixels" in error.message


def test_what_is_refused() -> None:
    pictures = Pictures(FACTS, SECTION)
    assert "unsupported format" in refused(pictures, data_url(b"%!PS-Adobe-3.0 EPSF-3.0")).message
    assert "several frames" in refused(pictures, data_url(_animation())).message
    assert "its own files" in refused(pictures, "file:///etc/passwd").message
    assert "its own files" in refused(pictures, "/etc/passwd").message
    assert "more than 1048576 bytes" in refused(pictures, data_url(bytes(1 << 21))).message
    assert "too long" in refused(pictures, data_url(image_file((1000, 2)))).message
    assert "does not fetch from" in refused(pictures, "https://evil.test/a.png").message
    assert "fetches no URLs" in refused(Pictures(FACTS, MediaSection()), "https://example.org/a.png").message


def _animation() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    frames = [Image.new("RGB", (40, 40), color) for color in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def test_files_elsewhere_are_asked_for_once_each() -> None:
    pictures = Pictures(FACTS, SECTION)
    parts = [part("https://example.org/a"), part(data_url(image_file())), part("https://example.org/a")]
    with pytest.raises(NeedsFiles) as caught:
        pictures.measured(parts, {})
    assert [one.url for one in caught.value.wanted] == ["https://example.org/a"]
    known = {"https://example.org/a": ImageHeader(format="JPEG", width=64, height=32, orientation=6)}
    found = pictures.measured(parts, known)
    assert [one.frames[0].url for one in found] == ["https://example.org/a", "", "https://example.org/a"]
    assert found[0].grid == FACTS.grid_of(64, 32).grid


def test_low_detail_is_small_and_another_image_to_caches() -> None:
    facts = msgspec.structs.replace(FACTS, max_pixels=2048 * 2048)
    pictures = Pictures(facts, MediaSection())
    source = data_url(image_file((1200, 1000)))
    high, auto, low = pictures.measured([part(source, d) for d in ("high", "auto", "low")], {})
    assert high == auto
    assert low.count < high.count
    assert low.target.canvas[0] * low.target.canvas[1] <= LOW_PIXELS
    other = Pictures(msgspec.structs.replace(facts, mean=(0.1, 0.2, 0.3)), MediaSection())
    (changed,) = other.measured([part(source)], {})
    assert changed.target.fingerprint != high.target.fingerprint


def test_pixels_of_all_images_of_a_prompt_are_bounded() -> None:
    pictures = Pictures(FACTS, MediaSection(max_request_pixels=3 * 64 * 64))
    one = data_url(image_file((64, 64)))
    assert len(pictures.measured([part(one)] * 3, {})) == 3
    with pytest.raises(InvalidRequest, match="--max-request-pixels"):
        pictures.measured([part(one)] * 4, {})
