"""Make the images of benchmark requests."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterable
from typing import Any


def picture(
    seed: int,
    size: tuple[int, int] = (4000, 3000),
    grain: int = 20,
    quality: int = 92,
    optimize: bool = False,
) -> str:
    """Return a data: URL of a JPEG that resembles a photograph, by default with 12 million pixels.

    ``grain`` is the size of details in pixels. Larger grains and ``optimize`` give smaller files.
    """
    import numpy as np
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (size[1] // grain, size[0] // grain, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(
        file, "JPEG", quality=quality, optimize=optimize
    )
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def noise(seed: int) -> str:
    """Return a data: URL of a small PNG with noise."""
    from PIL import Image

    size = (96 + 16 * (seed % 3), 64)
    file = io.BytesIO()
    pixels = random.Random(seed).randbytes(3 * size[0] * size[1])
    Image.frombytes("RGB", size, pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def messages(urls: Iterable[str], text: str = "") -> list[dict[str, Any]]:
    """Return one user message: the images, then ``text`` if not empty."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    if text:
        content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}]


def photographs(sizes: str, prompts: int, quality: int) -> list[list[str]]:
    """Return photographs for each of ``prompts`` prompts. ``sizes`` is a list such as
    ``5x1920x1080,2x3840x2160``.

    Each prompt has the given number of images of each size, drawn from twice as many, so prompts rarely have
    the same images in the same order. The images are smooth and the files small.
    """
    shown: list[list[str]] = [[] for _ in range(prompts)]
    for part in sizes.split(","):
        count, width, height = map(int, part.split("x"))
        seeds = range(1000 * width, 1000 * width + 2 * count)
        made = [picture(seed, (width, height), 192, quality, optimize=True) for seed in seeds]
        for number, each in enumerate(shown):
            each += random.Random(number).sample(made, count)
    return shown
