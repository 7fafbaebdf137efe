"""Image limits and embedding memory of a group, from the model and the settings."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.flags import parse_size
from weft.config.media import MediaFacts
from weft.config.resolved import KVConfig, MediaLimits
from weft.config.sections.all import MediaSection, SchedulerSection
from weft.config.sizing.memory import show_bytes
from weft.config.spec import DTYPE_BYTES, ModelSpec
from weft.types.media_item import BLOCK_ROWS

DEFAULT_BYTES = 512 << 20


def media_limits(
    spec: ModelSpec,
    dtype: str,
    max_model_len: int,
    section: MediaSection,
    *,
    tower: bool = True,
    takes: bool = False,
) -> MediaLimits | None:
    """Return the image limits of a group; None for a model without images.

    ``tower``: True if the group encodes images. ``takes``: True if embeddings arrive from other groups.

    Raise ConfigError if --mm-cache-bytes cannot hold the embedding of the largest image in whole blocks, or
    --mm-host-cache-bytes cannot hold one block.
    """
    vision = spec.vision
    if vision is None:
        return None
    media = vision.media
    # One row per token, plus one row per deepstack level.
    row_bytes = (1 + len(vision.levels)) * vision.output * DTYPE_BYTES[dtype]
    block = BLOCK_ROWS * row_bytes
    largest = -(-min(most_tokens(media), max_model_len) // BLOCK_ROWS) * block
    asked = None if section.mm_cache_bytes is None else parse_size(section.mm_cache_bytes)
    if asked is not None and asked < largest:
        raise ConfigError(
            f"--mm-cache-bytes {section.mm_cache_bytes} does not hold the embedding of the largest "
            f"image: set --mm-cache-bytes to at least {show_bytes(largest)}, or lower --max-model-len",
            param="--mm-cache-bytes",
        )
    host = None if section.mm_host_cache_bytes is None else parse_size(section.mm_host_cache_bytes)
    if host is not None and host < block:
        raise ConfigError(
            f"--mm-host-cache-bytes {section.mm_host_cache_bytes} is too small for any embedding: set "
            f"--mm-host-cache-bytes to at least {show_bytes(block)}, or remove the flag",
            param="--mm-host-cache-bytes",
        )
    return MediaLimits(
        patch=media.patch,
        merge=media.merge,
        frames=max(media.temporal, vision.frames),
        averaged=vision.frames > 1,
        row_bytes=row_bytes,
        cache_bytes=max(DEFAULT_BYTES, largest) if asked is None else asked,
        encode_patches=section.max_encode_patches,
        most_items=section.limit_mm_per_prompt * media.most_views,
        sections=spec.rope.sections is not None,
        tower=tower,
        takes=takes,
        host_bytes=host or 0,
        encode_items=section.max_encode_items,
        levels=len(vision.levels),
        width=vision.output,
        gaps=media.row_end is not None,
        whole=most_tokens(media) if vision.ahead != "none" else 0,
        ahead=ahead_groups(spec),
    )


def ahead_groups(spec: ModelSpec) -> tuple[int, ...]:
    """Return the KV cache groups with tokens of an image that attend to later tokens of the image."""
    ahead = "none" if spec.vision is None else spec.vision.ahead
    kinds = {"none": (), "windows": ("window",), "all": ("full", "window")}[ahead]
    return tuple(number for number, cache in enumerate(spec.caches) if cache.kind in kinds)


def check_whole_images(
    limits: MediaLimits | None, scheduler: SchedulerSection, kv: KVConfig, backend: str = "auto"
) -> None:
    """Raise ConfigError unless a step can compute a whole image beside all decode rows.

    Only for models with tokens of an image that attend to later tokens of the image. ``backend``: name of the
    attention backend.
    """
    if limits is None or not limits.whole or not (limits.tower or limits.takes):
        return
    if backend == "flashinfer":
        raise ConfigError(
            "attention backend 'flashinfer' does not let tokens of an image attend to later tokens of the "
            "image: use --attention-backend triton, or pass --language-model-only",
            param="--attention-backend",
        )
    whole = min(limits.whole, kv.max_model_len)
    least = whole + scheduler.max_num_seqs
    if scheduler.max_num_batched_tokens < least:
        raise ConfigError(
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens}: a step must compute an image of "
            f"up to {whole} tokens in one piece, beside --max-num-seqs {scheduler.max_num_seqs}; set "
            f"--max-num-batched-tokens to at least {least}, or pass --language-model-only",
            param="--max-num-batched-tokens",
        )
    for pool in kv.pools:
        if pool.cache.window and pool.num_blocks * pool.block_size < min(
            pool.cache.window + whole + pool.block_size, kv.max_model_len
        ):
            raise ConfigError(
                f"the KV cache of window layers does not hold an image of {whole} tokens: raise "
                f"--kv-cache-memory, or --long-prefill-token-threshold to at least {whole}",
                param="--kv-cache-memory",
            )


def embedding_bytes(
    spec: ModelSpec, dtype: str, max_model_len: int | str | None, section: MediaSection, *, host: bool
) -> int:
    """Return the approximate bytes of a rank's embedding pools on the device; 0 without images.

    With ``host``, add the second tier in host memory.
    """
    vision = spec.vision
    if vision is None:
        return 0
    row_bytes = (1 + len(vision.levels)) * vision.output * DTYPE_BYTES[dtype]
    longest = max_model_len if isinstance(max_model_len, int) else spec.max_position
    largest = min(most_tokens(vision.media), longest) * row_bytes
    asked = None if section.mm_cache_bytes is None else parse_size(section.mm_cache_bytes)
    second = parse_size(section.mm_host_cache_bytes or 0) if host else None
    return (asked or max(DEFAULT_BYTES, largest)) + (second or 0)


def most_tokens(media: MediaFacts) -> int:
    """Return the tokens of the largest item: an image, a tile or a frame group.

    Very elongated images may exceed the number slightly.
    """
    if media.kind == "area":
        return media.most_area // (media.patch * media.merge) ** 2
    token = media.patch * media.merge
    if media.kind == "budget":
        return media.most_budget
    if media.longest:
        side = -(-media.longest // token)
        return side * (side + (media.row_end is not None))
    side = -(-media.max_side // media.merge)
    patches = max(media.max_patches, 0 if media.frames is None else media.frames.max_patches)
    return min(side * side, -(-patches // media.merge**2) + side)
