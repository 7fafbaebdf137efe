"""Read format, size and orientation from an image's header, without decoding.

The formats are an allow-list: JPEG, PNG, WebP, GIF and BMP. Declared types are ignored. All numbers are
untrusted: reads are bounds-checked, and every loop iteration advances.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from weft.media.media_errors import BadMedia

Format: TypeAlias = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP"]
"""Pillow's name of the format."""
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=\"|>)([1-8])")
_ORIENTATION = 0x0112
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MOST_ENTRIES = 4096
"""Maximum entries of a directory in EXIF data."""
_PNG_XMP = b"XML:com.adobe.xmp\0"
MOST_SCANS = 100
"""Maximum scans of a JPEG. Encoders write about ten. Each scan covers all pixels."""
_MOST_PARTS = 1 << 17
"""Maximum parts of any kind examined in a file. Real files have far fewer."""


class ImageHeader(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The header of an image file."""

    format: Format
    width: int
    """Stored width in pixels, before orientation."""
    height: int
    orientation: int = 1
    """EXIF orientation, 1 to 8: the rotation or reflection from stored to displayed pixels."""
    scans: int = 1
    """Passes of the decoder over all pixels."""

    @property
    def work(self) -> int:
        """Pixels visited by the decoder in all passes, at least 1."""
        return max(self.width * self.height * self.scans, 1)

    @property
    def shown(self) -> tuple[int, int]:
        """(height, width) of the displayed image."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def read_header(data: bytes | memoryview) -> ImageHeader:
    """Return the header of a complete file, without decoding.

    Raises BadMedia for other formats, damaged headers, animations and JPEGs with too many scans.
    """
    view = memoryview(data)
    start = bytes(view[:16])
    try:
        # The first bytes decide, never the declared type.
        if start.startswith(b"\xff\xd8\xff"):
            found = _jpeg(view)
        elif start.startswith(b"\x89PNG\r\n\x1a\n"):
            found = _png(view)
        elif start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            found = _webp(view)
        elif start[:6] in (b"GIF87a", b"GIF89a"):
            found = _gif(view)
        elif start[:2] == b"BM":
            found = _bmp(view)
        else:
            raise BadMedia("has an unsupported format; send JPEG, PNG, WebP, GIF or BMP")
    except (struct.error, IndexError):
        raise BadMedia("is damaged: its header ends too early") from None
    if found.width < 1 or found.height < 1:
        raise BadMedia("is damaged: its header has a width or height of 0")
    return found


def _jpeg(view: memoryview) -> ImageHeader:
    """Return the header of a JPEG: markers are read up to the frame header (SOF). Raises BadMedia."""
    at = 2
    orientation = 0
    for _ in range(_MOST_PARTS):
        if view[at] != 0xFF:
            raise BadMedia("is damaged: only its first bytes are a JPEG")
        at += 1
        marker = view[at]
        if marker == 0xFF:  # fill bytes before a marker
            continue
        at += 1
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a length
            continue
        if marker in (0xD9, 0xDA):
            raise BadMedia("is damaged: its size is missing before the pixels or the end")
        (size,) = struct.unpack_from(">H", view, at)
        if size < 2:
            raise BadMedia("is damaged: a segment has no length")
        part = view[at + 2 : at + size]
        if marker in _SOF:
            _, height, width = struct.unpack_from(">BHH", part)
            return ImageHeader(
                format="JPEG",
                width=width,
                height=height,
                orientation=orientation or 1,
                scans=_scans(view, at + size),
            )
        if marker == 0xE1:
            orientation = orientation or _orientation_in(part)
        at += size
    raise _too_many_parts()


_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.DOTALL)
"""A marker, except restart markers. In pixel data, a zero byte follows each 0xFF byte."""


def _scans(view: memoryview, at: int) -> int:
    """Return the number of scans of a JPEG from ``at`` on, at least 1. Raises BadMedia for more than
    ``MOST_SCANS`` scans, and IndexError for a cut marker.

    Follows a decoder: skips bytes without a marker, and does not count scans in comments or previews. A
    marker below 0xC0 has no length.
    """
    found = 0
    for _ in range(_MOST_PARTS):
        at = _behind_marker(view, at)
        if at < 0 or view[at - 1] == 0xD9:
            return max(found, 1)
        marker = view[at - 1]
        # 0xD9: end of image; 0xD8: start of image; 0xDA: start of a scan.
        if marker < 0xC0 or marker == 0xD8:
            continue
        if marker == 0xDA:
            found += 1
            if found > MOST_SCANS:
                raise BadMedia(
                    f"is a JPEG with more than {MOST_SCANS} scans; save the image as a baseline JPEG, or "
                    "with fewer scans"
                )
        at += int.from_bytes(view[at : at + 2], "big")
    raise _too_many_parts()


def _behind_marker(view: memoryview, at: int) -> int:
    """Return the position behind the next marker from ``at`` on; -1 without a marker."""
    match = _MARKER.search(view, at)
    return match.end() if match is not None else -1


def _orientation_in(part: memoryview) -> int:
    """Return the orientation in an application segment; 0 if the segment has none."""
    if bytes(part[:6]) == b"Exif\0\0":
        return _exif(part[6:])
    if bytes(part[: len(_XMP)]) == _XMP:
        return _xmp(part)
    return 0


def _xmp(text: memoryview) -> int:
    found = _XMP_ORIENTATION.search(text)
    return int(found[1]) if found else 0


def _exif(data: memoryview) -> int:
    """Return the orientation in a TIFF structure.

    Return 0 if missing or damaged: the image itself may still be valid.
    """
    if bytes(data[:6]) == b"Exif\0\0":
        data = data[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(data[:4]))
    if order is None:
        return 0
    try:
        (at,) = struct.unpack_from(order + "I", data, 4)
        (entries,) = struct.unpack_from(order + "H", data, at)
        for number in range(min(entries, _MOST_ENTRIES)):
            # Directory entry: tag, type (3: short, 4: long), count, value; 12 bytes.
            tag, kind, count = struct.unpack_from(order + "HHI", data, at + 2 + 12 * number)
            if tag == _ORIENTATION and count == 1 and kind in (3, 4):
                form = order + ("H" if kind == 3 else "I")
                (value,) = struct.unpack_from(form, data, at + 2 + 12 * number + 8)
                return int(value) if 1 <= value <= 8 else 0
    except struct.error:
        return 0
    return 0


def _png(view: memoryview) -> ImageHeader:
    """Return the header of a PNG. Raises BadMedia, also for animations."""
    size, kind, width, height = struct.unpack_from(">I4sII", view, 8)
    if kind != b"IHDR" or size != 13:
        raise BadMedia("is damaged: it is a PNG without a header")
    orientation = 0
    for name, data in _png_chunks(view):
        if name == b"acTL" and struct.unpack_from(">I", data)[0] > 1:
            raise _animated()
        # The EXIF chunk has precedence over XMP, in any order.
        if name == b"eXIf":
            orientation = _exif(data) or orientation
        if name == b"iTXt" and bytes(data[: len(_PNG_XMP)]) == _PNG_XMP and not data[len(_PNG_XMP)]:
            orientation = orientation or _xmp(data)
    return ImageHeader(format="PNG", width=width, height=height, orientation=orientation or 1)


def _png_chunks(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (name, data) of each chunk, up to IEND or the end of the file. The data of the last chunk may
    be cut off. Raises BadMedia for too many chunks."""
    at = 8
    for _ in range(_MOST_PARTS):
        if at + 12 > len(view):
            return
        size, name = struct.unpack_from(">I4s", view, at)
        yield name, view[at + 8 : at + 8 + size]
        if name == b"IEND":
            return
        at += 12 + size
    raise _too_many_parts()


def _webp(view: memoryview) -> ImageHeader:
    """Return the header of a WebP. Raises BadMedia, also for animations."""
    found: tuple[int, int] | None = None
    orientation = 0
    for name, data in _webp_chunks(view):
        if name == b"VP8X":
            if data[0] & 0x02:
                raise _animated()
            found = 1 + int.from_bytes(data[4:7], "little"), 1 + int.from_bytes(data[7:10], "little")
        # The canvas size in VP8X has precedence.
        elif name == b"VP8L" and found is None:
            (bits,) = struct.unpack_from("<I", data, 1)
            found = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        elif name == b"VP8 " and found is None:
            width, height = struct.unpack_from("<HH", data, 6)
            found = width & 0x3FFF, height & 0x3FFF
        elif name in (b"ANIM", b"ANMF"):
            raise _animated()
        elif name == b"EXIF":
            orientation = _exif(data) or orientation
        elif name == b"XMP ":
            orientation = orientation or _xmp(data)
    if found is None:
        raise BadMedia("is damaged: it is a WebP without an image")
    return ImageHeader(format="WEBP", width=found[0], height=found[1], orientation=orientation or 1)


def _webp_chunks(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (name, data) of each chunk. Chunks are padded to even sizes. Raises BadMedia for too many
    chunks."""
    at = 12
    for _ in range(_MOST_PARTS):
        if at + 8 > len(view):
            return
        name, size = struct.unpack_from("<4sI", view, at)
        yield name, view[at + 8 : at + 8 + size]
        at += 8 + size + (size & 1)
    raise _too_many_parts()


def _gif(view: memoryview) -> ImageHeader:
    """Return the header of a GIF: the canvas, enlarged to contain the frame. Raises BadMedia for an
    animation, or without an image."""
    width, height, flags = struct.unpack_from("<HHB", view, 6)
    at = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    frames = 0
    for _ in range(_MOST_PARTS):
        if at >= len(view) or (kind := view[at]) == 0x3B:
            break
        # 0x21: extension; 0x2C: image; 0x3B: trailer.
        if kind == 0x21:
            at = _after_blocks(view, at + 2)
        elif kind == 0x2C:
            frames += 1
            if frames > 1:
                raise _animated()
            left, top, wide, high, flags = struct.unpack_from("<HHHHB", view, at + 1)
            width, height = max(width, left + wide), max(height, top + high)
            table = 3 << ((flags & 7) + 1) if flags & 0x80 else 0
            at = _after_blocks(view, at + 10 + table + 1)
        else:  # decoders skip unknown bytes
            at += 1
    else:
        raise _too_many_parts()
    if not frames:
        raise BadMedia("is damaged: it is a GIF without an image")
    return ImageHeader(format="GIF", width=width, height=height)


def _after_blocks(view: memoryview, at: int) -> int:
    """Return the position behind a chain of length-prefixed blocks starting at ``at``; may lie behind the
    end of the file. Raises BadMedia for too many blocks."""
    for _ in range(_MOST_PARTS):
        if at >= len(view) or not view[at]:
            return at + 1
        at += 1 + view[at]
    raise _too_many_parts()


def _bmp(view: memoryview) -> ImageHeader:
    """Return the header of a BMP. A negative height, for rows from top to bottom, becomes positive. Raises
    BadMedia for an unknown header."""
    (size,) = struct.unpack_from("<I", view, 14)
    if size == 12:
        width, height = struct.unpack_from("<HH", view, 18)
    elif size >= 40:
        width, height = struct.unpack_from("<ii", view, 18)
    else:
        raise BadMedia("is damaged: it is a BMP without a header")
    return ImageHeader(format="BMP", width=width, height=abs(height))


def _too_many_parts() -> BadMedia:
    return BadMedia("is damaged: it has too many parts")


def _animated() -> BadMedia:
    return BadMedia("has several frames; send one frame as an image")
