"""Checks of the KV disk tier, and its sizes in bytes."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.flags import parse_size
from weft.config.sections.all import Config
from weft.config.sections.tier_section import TierSection, disk_bytes

_LEAST = 16 << 20


def check_tier(config: Config, device: str) -> TierSection:
    """Return the section of the disk tier. Raise ConfigError for settings that cannot work together."""
    tier, role = config.tier, config.transfer.role
    if tier.kv_disk is None:
        _check_alone(tier)
        return tier
    flag = "--kv-disk"
    if tier_bytes(tier) < _LEAST:
        raise ConfigError(f"--kv-disk must be at least {_LEAST >> 20}M", param=flag)
    if device != "cpu":
        raise ConfigError(
            "--kv-disk works with --device cpu only: remove --kv-disk, or enlarge the KV cache with "
            "--gpu-memory-utilization",
            param=flag,
        )
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            "--kv-disk requires the prefix cache: remove --no-enable-prefix-caching", param=flag
        )
    if role in ("decode", "encode"):
        raise ConfigError(
            f"--kv-disk: a group of role {role} computes no prompts; set kv-disk for the prefill groups "
            "alone",
            param=flag,
        )
    return tier


def tier_bytes(tier: TierSection) -> int:
    """Return the bytes of the disk tier. Raise ConfigError if --kv-disk is neither a size nor "auto"."""
    size = parse_size(tier.kv_disk)
    if size is None and tier.kv_disk != "auto":
        raise ConfigError(
            f"--kv-disk {tier.kv_disk} is neither a size such as 20G nor auto", param="--kv-disk"
        )
    return disk_bytes(tier, size)


def write_rate(tier: TierSection) -> float:
    """Return the bytes per second that a rank may write; 0 for no limit."""
    return float(parse_size(tier.kv_disk_write_rate) or 0)


def _check_alone(tier: TierSection) -> None:
    """Raise ConfigError for settings of a tier that is off."""
    default = TierSection()
    for name in ("kv_disk_dir", "kv_store", "kv_disk_ttl", "kv_disk_write_rate", "kv_disk_shared"):
        if getattr(tier, name) != getattr(default, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} requires --kv-disk", param=flag)
