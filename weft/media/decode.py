"""Decode images to pixels with Pillow, as the reference processors do: upright, RGB on white, resized.

Only this module imports Pillow, at first use. Pillow is an extra (``weft[vision]``).
"""

from __future__ import annotations

import importlib.util
import io
import itertools
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from weft.media.headers import ImageHeader
from weft.media.media_errors import BadMedia
from weft.media.media_messages import Target

if TYPE_CHECKING:
    from PIL.Image import Image

KEY_BYTES = 16


def can_decode() -> bool:
    """Return True if Pillow is installed. Imports nothing."""
    return importlib.util.find_spec("PIL") is not None


def missing() -> BadMedia:
    """Return the error of a server without Pillow."""
    return BadMedia(
        "cannot be decoded: the server has no Pillow; install weft[vision] on the server", "no_vision"
    )


def load() -> None:
    """Import Pillow and the readers of the supported formats. Raises BadMedia without Pillow."""
    try:
        from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
    except ImportError:
        raise missing() from None
    del BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin


def group_pixels(
    files: Sequence[tuple[bytes | memoryview, ImageHeader]], targets: Sequence[Target]
) -> list[bytes]:
    """Return the pixels of each target, uint8 [frames, height, width, 3] as bytes, for one image file or the
    files of a frame group.

    ``files``: (file, its header). Raises BadMedia with the number of the frame.
    """
    made = []
    for number, (data, header) in enumerate(files):
        try:
            made.append(_views_of(data, header, targets))
        except BadMedia as error:
            raise BadMedia(error.reason, error.code, number) from None
    return made[0] if len(made) == 1 else [b"".join(frames) for frames in zip(*made, strict=True)]


def pixels_of(data: bytes | memoryview, header: ImageHeader, target: Target) -> bytes:
    """Return uint8 [height, width, 3] of one file as bytes: upright, on white, resized.

    The caller must have checked the pixel count of ``header`` against the server's limit, because Pillow's
    own limit is disabled for the process. Raises BadMedia for a damaged file, for a size other than the
    header's, for lack of memory, and without Pillow.
    """
    return _views_of(data, header, (target,))[0]


def _views_of(data: bytes | memoryview, header: ImageHeader, targets: Sequence[Target]) -> list[bytes]:
    """Return the pixels of each target of one file; see ``pixels_of``. The file is decoded once."""
    load()
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the caller checked the header against the server's limit
    try:
        with Image.open(io.BytesIO(data), formats=[header.format]) as image:
            # The limits were checked against our header, so Pillow must read the same size.
            if image.size != (header.width, header.height):
                raise BadMedia("is damaged: its headers have two different sizes")
            image.load()
            return views(upright(image, header.orientation), targets)
    except BadMedia:
        raise
    except MemoryError:
        raise BadMedia("needs more memory to decode than this server allows; send a smaller image") from None
    except Exception:  # readers raise arbitrary errors for damaged files
        raise BadMedia("cannot be decoded: the file is damaged or cut off") from None


def upright(image: Image, orientation: int) -> Image:
    """Return ``image`` turned by its EXIF orientation (1 to 8)."""
    from PIL.Image import Transpose

    turn = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(orientation)
    return image if turn is None else image.transpose(turn)


def views(image: Image, targets: Sequence[Target]) -> list[bytes]:
    """Return the pixels of each target of an upright image: uint8 [height, width, 3] as bytes. Transparent
    parts become white. Neighbouring targets with the same size are parts of one resized image.
    """
    from PIL import Image as images

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        clear = image.convert("RGBA")
        white = images.new("RGBA", clear.size, (255, 255, 255, 255))
        image = images.alpha_composite(white, clear)
        del clear, white
    if image.mode != "RGB":
        image = image.convert("RGB")
    made: list[bytes] = []
    for _, same in itertools.groupby(targets, lambda one: (one.height, one.width, one.canvas)):
        parts = list(same)
        canvas = _resized(image, parts[0])
        for part in (target.part for target in parts):
            # Pillow's box is (left, top, right, bottom).
            box = None if part is None else (part[1], part[0], part[1] + part[3], part[0] + part[2])
            made.append((canvas if box is None else canvas.crop(box)).tobytes())
    return made


def view(image: Image, target: Target) -> bytes:
    """Return the pixels of one target of an upright image; see ``views``."""
    return views(image, (target,))[0]


def _resized(image: Image, target: Target) -> Image:
    """Return an image in RGB in the size of the canvas of ``target``."""
    from PIL import Image as images

    image = image.resize((target.width, target.height), resample=images.Resampling(target.resample))
    height, width = target.canvas
    if (width, height) == image.size:
        return image
    # [height, width, 3]: the image in the upper left corner, the rest black.
    canvas = images.new("RGB", (width, height))
    canvas.paste(image, (0, 0))
    return canvas


def key_of(pixels: bytes | memoryview, target: Target) -> bytes:
    """Return the cache key of an item: a hash of the pixels, their shape and the model's processing.

    Equal tiles have the same key at every position of an image.
    """
    found = blake2b(digest_size=KEY_BYTES)
    for part in (target.fingerprint, repr(target.shape).encode()):
        found.update(len(part).to_bytes(8, "little") + part)
    found.update(pixels)
    return found.digest()
