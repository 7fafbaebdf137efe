"""Make test images as files and URLs, and the reference result of a model for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from weft.config.media import MediaFacts
from weft.config.parts.video_frames import VideoFacts

PLACEHOLDER = 258
FACTS = MediaFacts(
    kind="area",
    patch=16,
    temporal=2,
    merge=2,
    min_pixels=32 * 32,
    max_pixels=256 * 256,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    placeholder=PLACEHOLDER,
    start=PLACEHOLDER + 1,
    end=PLACEHOLDER + 2,
    video=PLACEHOLDER + 3,
    frames=VideoFacts(min_pixels=4 * 32 * 32, max_pixels=16 * 128 * 128),
)


def image_file(size: tuple[int, int] = (64, 48), format: str = "PNG", seed: int = 1, **options: Any) -> bytes:
    """Return an image file of ``size`` (width, height). ``seed`` determines the content."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, format, **options)
    return file.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def video_part(files: Sequence[bytes], **more: Any) -> dict[str, Any]:
    """Return a video part of a chat message with the given frames."""
    return {"type": "video", "video": [data_url(file) for file in files], **more}


def image_part(file: bytes, **more: Any) -> dict[str, Any]:
    """A part of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(file), **more}}
