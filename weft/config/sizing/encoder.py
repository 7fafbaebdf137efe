"""A group that only encodes images (``--role encode``): the loaded weights and the memory, from settings."""

from __future__ import annotations

import msgspec

from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.resolved import HostShare, KVConfig
from weft.config.sections.all import Config
from weft.config.sizing.cache_sizes import ranks_on_device
from weft.config.sizing.media_limits import media_limits
from weft.config.sizing.memory import encoding_bytes, show_bytes, tower_bytes
from weft.config.spec import ModelSpec


def check_encoder(config: Config) -> None:
    """Raise ConfigError for settings without meaning in an encode group."""
    if config.model.language_model_only:
        raise ConfigError(
            "--role encode loads only the vision tower, and --language-model-only loads everything "
            "except the vision tower: remove one of the two flags",
            param="--language-model-only",
        )
    parallel = config.parallel
    for flag, given in (
        ("--enable-expert-parallel", parallel.enable_expert_parallel),
        ("--redundant-experts", parallel.redundant_experts),
        ("--eplb-interval", parallel.eplb_interval),
    ):
        if given:
            raise ConfigError(
                f"--role encode and {flag}: a vision tower has no experts; remove {flag}", param=flag
            )


def encoder_spec(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` without KV cache groups and MTP modules.

    Raise ConfigError for a model without a tower.
    """
    if spec.vision is None:
        raise ConfigError(
            f"--role encode: {spec.architecture} has no vision tower; use a model with image input, or "
            "another role",
            param="--role",
        )
    return msgspec.structs.replace(spec, caches=(), mtp_layers=0)


def encoder_caches(spec: ModelSpec, dtype: str, config: Config, host: HostShare) -> KVConfig:
    """Return a configuration with an embedding cache and no KV pools.

    Raise ConfigError if a rank's memory cannot hold the tower, one step and the cached embeddings.
    """
    vision = spec.vision
    assert vision is not None
    asked = config.model.max_model_len
    length = min(asked, spec.max_position) if isinstance(asked, int) else spec.max_position
    limits = media_limits(spec, dtype, length, config.media)
    assert limits is not None
    weights = tower_bytes(vision, dtype)
    step = encoding_bytes(vision, dtype, limits.encode_patches)
    have = devices.available_memory()
    if have is not None:
        have //= ranks_on_device(config.parallel, "cpu", host)
    kept = limits.pool_bytes + limits.host_bytes
    if have is not None and weights + step + kept > have:
        raise ConfigError(
            f"--role encode: the vision tower takes {show_bytes(weights)}, a step {show_bytes(step)} "
            f"and the embedding cache {show_bytes(kept)}; a rank has {show_bytes(have)}: lower "
            "--mm-cache-bytes or --max-encode-patches",
            param="--mm-cache-bytes",
        )
    return KVConfig(
        pools=(),
        block_size=config.cache.block_size,
        enable_prefix_caching=False,
        max_model_len=length,
        num_slots=0,
        media=limits,
    )
