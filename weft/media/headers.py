"""What an image's header says: its format, size and orientation, without decoding any of it.

An allow-list of formats: JPEG, PNG, WebP, GIF and BMP. What a client or server declares is not looked at.
Every number comes from outside: reads are bounds-checked, and loops advance with each turn.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from weft.media.errors import BadMedia

Format: TypeAlias = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP"]
"""As Pillow names them."""
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=\"|>)([1-8])")
_ORIENTATION = 0x0112
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MOST_ENTRIES = 4096
"""Of a directory in EXIF data."""
_PNG_XMP = b"XML:com.adobe.xmp\0"
MOST_SCANS = 100
"""Of a JPEG: encoders write about ten. Each scan goes over all pixels."""
_MOST_TURNS = 1 << 17
"""Parts that are looked at, of whatever kind: far more than real files have."""


class ImageHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an image before it is decoded."""

    format: Format
    width: int
    """Pixels as they are stored."""
    height: int
    orientation: int = 1
    """As EXIF numbers them, 1 to 8: how stored pixels are turned to be shown."""

    scans: int = 1
    """Passes over all pixels that decoding takes."""

    @property
    def work(self) -> int:
        """Pixels that decoding goes over, at least 1."""
        return max(self.width * self.height * self.scans, 1)

    @property
    def shown(self) -> tuple[int, int]:
        """(height, width) as the image is shown."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def read_header(data: bytes | memoryview) -> ImageHeader:
    """The header of a whole file. Raises BadMedia for other formats, damaged headers and animations."""
    view = memoryview(data)
    start = bytes(view[:16])
    try:
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
            raise BadMedia("is in no format that this server reads; send JPEG, PNG, WebP, GIF or BMP")
    except (struct.error, IndexError):
        raise BadMedia("is damaged: its header ends too early") from None
    if found.width < 1 or found.height < 1:
        raise BadMedia("is damaged: it says that it has no pixels")
    return found


def _jpeg(view: memoryview) -> ImageHeader:
    at = 2
    orientation = 0
    for _ in range(_MOST_TURNS):
        if view[at] != 0xFF:
            raise BadMedia("is damaged: it is no JPEG behind its first bytes")
        at += 1
        marker = view[at]
        if marker == 0xFF:  # there may be any number of them before a marker
            continue
        at += 1
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # they stand alone
            continue
        if marker in (0xD9, 0xDA):
            raise BadMedia("is damaged: it has pixels, or an end, before its size")
        (size,) = struct.unpack_from(">H", view, at)
        if size < 2:
            raise BadMedia("is damaged: a part of it has no length")
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
"""Not 0xFF of pixels, behind which encoders write a zero, and no mark between rows of pixels."""


def _scans(view: memoryview, at: int) -> int:
    """Number of scans of a JPEG from ``at`` on. Raises BadMedia for too many.

    Steps over parts as decoders do: bytes that are no marker are skipped, and a comment or the preview of a
    camera counts nothing. Marks below 0xC0 have no length: a decoder steps over them alone, or fails.
    """
    found = 0
    for _ in range(_MOST_TURNS):
        at = _behind_marker(view, at)
        if at < 0 or view[at - 1] == 0xD9:
            return max(found, 1)
        marker = view[at - 1]
        if marker < 0xC0 or marker == 0xD8:
            continue
        if marker == 0xDA:
            found += 1
            if found > MOST_SCANS:
                raise BadMedia(
                    f"is a JPEG of more than {MOST_SCANS} scans; save it again, not progressive or with "
                    "fewer scans"
                )
        at += int.from_bytes(view[at : at + 2], "big")
    raise _too_many_parts()


def _behind_marker(view: memoryview, at: int) -> int:
    """Position behind the next marker from ``at`` on; -1 where there is none."""
    match = _MARKER.search(view, at)
    return match.end() if match is not None else -1


def _orientation_in(part: memoryview) -> int:
    """Of an application segment; 0 where it has none."""
    if bytes(part[:6]) == b"Exif\0\0":
        return _exif(part[6:])
    if bytes(part[: len(_XMP)]) == _XMP:
        return _xmp(part)
    return 0


def _xmp(text: memoryview) -> int:
    found = _XMP_ORIENTATION.search(text)
    return int(found[1]) if found else 0


def _exif(data: memoryview) -> int:
    """The orientation in a TIFF structure; 0 where it has none, or is damaged: the image itself may be
    well.
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
            tag, kind, count = struct.unpack_from(order + "HHI", data, at + 2 + 12 * number)
            if tag == _ORIENTATION and count == 1 and kind in (3, 4):
                form = order + ("H" if kind == 3 else "I")
                (value,) = struct.unpack_from(form, data, at + 2 + 12 * number + 8)
                return int(value) if 1 <= value <= 8 else 0
    except struct.error:
        return 0
    return 0


def _png(view: memoryview) -> ImageHeader:
    size, kind, width, height = struct.unpack_from(">I4sII", view, 8)
    if kind != b"IHDR" or size != 13:
        raise BadMedia("is damaged: it is a PNG without a header")
    orientation = 0
    for name, data in _png_chunks(view):
        if name == b"acTL" and struct.unpack_from(">I", data)[0] > 1:
            raise _animated()
        if name == b"eXIf":
            orientation = _exif(data) or orientation
        if name == b"iTXt" and bytes(data[: len(_PNG_XMP)]) == _PNG_XMP and not data[len(_PNG_XMP)]:
            orientation = orientation or _xmp(data)
    return ImageHeader(format="PNG", width=width, height=height, orientation=orientation or 1)


def _png_chunks(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    at = 8
    for _ in range(_MOST_TURNS):
        if at + 12 > len(view):
            return
        size, name = struct.unpack_from(">I4s", view, at)
        yield name, view[at + 8 : at + 8 + size]
        if name == b"IEND":
            return
        at += 12 + size
    raise _too_many_parts()


def _webp(view: memoryview) -> ImageHeader:
    found: tuple[int, int] | None = None
    orientation = 0
    for name, data in _webp_chunks(view):
        if name == b"VP8X":
            if data[0] & 0x02:
                raise _animated()
            found = 1 + int.from_bytes(data[4:7], "little"), 1 + int.from_bytes(data[7:10], "little")
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
    at = 12
    for _ in range(_MOST_TURNS):
        if at + 8 > len(view):
            return
        name, size = struct.unpack_from("<4sI", view, at)
        yield name, view[at + 8 : at + 8 + size]
        at += 8 + size + (size & 1)
    raise _too_many_parts()


def _gif(view: memoryview) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", view, 6)
    at = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    frames = 0
    for _ in range(_MOST_TURNS):
        if at >= len(view) or (kind := view[at]) == 0x3B:
            break
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
        else:  # decoders step over what they do not know
            at += 1
    else:
        raise _too_many_parts()
    if not frames:
        raise BadMedia("is damaged: it is a GIF without an image")
    return ImageHeader(format="GIF", width=width, height=height)


def _after_blocks(view: memoryview, at: int) -> int:
    """Behind a chain of blocks, each with its length in its first byte, that begins at ``at``."""
    for _ in range(_MOST_TURNS):
        if at >= len(view) or not view[at]:
            return at + 1
        at += 1 + view[at]
    raise _too_many_parts()


def _bmp(view: memoryview) -> ImageHeader:
    (size,) = struct.unpack_from("<I", view, 14)
    if size == 12:
        width, height = struct.unpack_from("<HH", view, 18)
    elif size >= 40:
        width, height = struct.unpack_from("<ii", view, 18)
    else:
        raise BadMedia("is damaged: it is a BMP without a header")
    return ImageHeader(format="BMP", width=width, height=abs(height))


def _too_many_parts() -> BadMedia:
    return BadMedia("is damaged: it consists of far too many parts")


def _animated() -> BadMedia:
    return BadMedia("has several frames; send the one that is meant, as an image of its own")
