"""Settings of images in requests; one of the sections (see ``sections``)."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from weft.common.errors import ConfigError
from weft.config.foreign import most_images
from weft.config.sections.parallel_section import Section

_DOMAIN = re.compile(r"(\*|(\*\.)?[a-z0-9\-]{1,63}(\.[a-z0-9\-]{1,63})*|\[[0-9a-f:.]+\])(:\d{1,5})?")


class MediaSection(Section, frozen=True, kw_only=True):
    """Images in requests."""

    allowed_media_domains: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts from which image URLs (http or https) are fetched: example.org, "
            "*.example.org for subdomains, example.org:8443 for another port, * for all. Default: "
            "none, only data: URLs. Weft connects to public addresses only."
        ),
    ] = ()
    limit_mm_per_prompt: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="Maximum images per prompt. Two frames of a video count as one image, and so do all "
            "tiles of an image. 0: reject images.",
            extra={"reader": most_images},
        ),
    ] = 16
    mm_cache_bytes: Annotated[
        str | None,
        Meta(
            description="Size of each rank's cache of image embeddings, e.g. 1G. The cache holds "
            "embeddings in use, and earlier embeddings for repeated images. Default: 512M, or more if "
            "the largest image requires more.",
            extra={"size": True},
        ),
    ] = None
    mm_host_cache_bytes: Annotated[
        str | None,
        Meta(
            description="Host memory per rank, e.g. 4G, for embeddings evicted from --mm-cache-bytes. "
            "Default: none.",
            extra={"size": True},
        ),
    ] = None
    max_encode_items: Annotated[
        int,
        Meta(ge=1, le=4096, description="Maximum images per step of an encode group."),
    ] = 32
    max_encode_patches: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 24,
            description="Maximum image patches encoded per step. A larger image gets a step of its own.",
        ),
    ] = 16384
    max_image_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="Maximum bytes of an image file.")
    ] = 20 << 20
    max_video_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="Maximum bytes of a video file.")
    ] = 64 << 20
    max_video_seconds: Annotated[
        float, Meta(gt=0, le=86400, description="Maximum duration of a video file, in seconds.")
    ] = 600.0
    video_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description="Maximum seconds to decode a video file, and maximum seconds of CPU time.",
        ),
    ] = 60.0
    max_image_pixels: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 30,
            description="Maximum pixels of an image or of a video frame, checked before decoding. The memory "
            "of a media worker follows from this limit.",
        ),
    ] = 64 << 20
    max_request_pixels: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 34,
            description="Maximum pixels of all images of a prompt. Each scan of a progressive JPEG "
            "counts again. An image that the model enlarges counts enlarged. Of a video file, only the "
            "chosen frames count.",
        ),
    ] = 512 << 20
    media_timeout: Annotated[
        float,
        Meta(gt=0, le=600, description="Maximum seconds to fetch an image, and again to decode the image."),
    ] = 20.0
    media_workers: Annotated[
        int, Meta(ge=1, le=256, description="Processes per API server that decode images.")
    ] = 2
    media_memory: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Maximum bytes of decoded images that each API server holds for running "
            "requests, and each encode group for unsent embeddings. Further requests get 429.",
        ),
    ] = 2 << 30


def check_media(section: MediaSection) -> None:
    """Check values that the types of the flags cannot express. Raise ConfigError."""
    if any(not _DOMAIN.fullmatch(entry.lower()) for entry in section.allowed_media_domains):
        raise ConfigError(
            "--allowed-media-domains must be hosts without a scheme or path: example.org, *.example.org, "
            "example.org:8443, *",
            param="--allowed-media-domains",
        )
