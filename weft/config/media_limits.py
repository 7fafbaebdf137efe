"""What a group keeps and takes of images, from its model and settings."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.flags import parse_size
from weft.config.memory import show_bytes
from weft.config.resolved import MediaLimits
from weft.config.sections import CacheSection, SchedulerSection
from weft.config.spec import DTYPE_BYTES, ModelSpec

DEFAULT_BYTES = 512 << 20


def media_limits(
    spec: ModelSpec, dtype: str, max_model_len: int, cache: CacheSection, scheduler: SchedulerSection
) -> MediaLimits | None:
    """None for a model that takes no images.

    Raises ConfigError where --mm-cache-bytes does not hold the embedding of the largest image.
    """
    vision = spec.vision
    if vision is None:
        return None
    media = vision.media
    row_bytes = (1 + len(vision.levels)) * vision.output * DTYPE_BYTES[dtype]
    largest = min(media.largest // media.merge**2, max_model_len) * row_bytes
    asked = None if cache.mm_cache_bytes is None else parse_size(cache.mm_cache_bytes)
    if asked is not None and asked < largest:
        raise ConfigError(
            f"--mm-cache-bytes {cache.mm_cache_bytes} does not hold the embedding of the largest image: set "
            f"it to at least {show_bytes(largest)}, or lower --max-model-len",
            param="--mm-cache-bytes",
        )
    return MediaLimits(
        patch=media.patch,
        merge=media.merge,
        frames=max(media.temporal, vision.frames),
        row_bytes=row_bytes,
        cache_bytes=max(DEFAULT_BYTES, largest) if asked is None else asked,
        encode_patches=scheduler.max_encode_patches,
        most_items=scheduler.limit_mm_per_prompt,
        sections=spec.rope.sections is not None,
    )
