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
            description="Hosts whose http(s) URLs requests may name as images: example.org, *.example.org "
            "for all below it, * for all; example.org:8443 for a port of its own. None by default: images "
            "come as data: URLs. Only public addresses are ever connected to."
        ),
    ] = ()
    limit_mm_per_prompt: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="Images of one prompt at most; two frames of a video count as one. 0 refuses them.",
            extra={"reader": most_images},
        ),
    ] = 16
    mm_cache_bytes: Annotated[
        str | None,
        Meta(
            description="Embeddings of images that each rank keeps, e.g. 1G: those being read, and earlier "
            "ones, for prompts with the same image. By default 512M, or what the largest image takes.",
            extra={"size": True},
        ),
    ] = None
    mm_host_cache_bytes: Annotated[
        str | None,
        Meta(
            description="Host memory of each rank, e.g. 4G, for embeddings that no longer fit into "
            "--mm-cache-bytes. None by default.",
            extra={"size": True},
        ),
    ] = None
    max_encode_items: Annotated[
        int,
        Meta(ge=1, le=4096, description="Images that a step of a group with the role encode takes together."),
    ] = 32
    max_encode_patches: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 24,
            description="Patches of images that one step encodes; one image alone may have more.",
        ),
    ] = 16384
    max_image_bytes: Annotated[int, Meta(ge=1024, le=1 << 30, description="Largest file of an image.")] = (
        20 << 20
    )
    max_image_pixels: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 30,
            description="Pixels of the largest image, as its header says before it is decoded. The memory "
            "of a media worker follows from it.",
        ),
    ] = 64 << 20
    max_request_pixels: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 34,
            description="Pixels of all images of a prompt together, counted once for each scan of a JPEG.",
        ),
    ] = 512 << 20
    media_timeout: Annotated[
        float,
        Meta(gt=0, le=600, description="Seconds to fetch an image in, and as many to decode it."),
    ] = 20.0
    media_workers: Annotated[
        int, Meta(ge=1, le=256, description="Processes of each front that decode images.")
    ] = 2
    media_memory: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Bytes of images that each front holds for requests that are being answered, and "
            "each group with the role encode for those whose embeddings it sends; beyond it they get 429.",
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
