"""Checks of the KV tier, and its sizes in bytes."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.flags import parse_size
from weft.config.sections.all import Config
from weft.config.sections.tier_section import TierSection, disk_bytes
from weft.config.sizing.remote_url import check_url

_LEAST = 16 << 20


def check_tier(config: Config, device: str) -> TierSection:
    """Return the section of the tier. Raise ConfigError for settings that cannot work together."""
    tier = config.tier
    if tier.kv_disk is None:
        _check_no_disk(tier)
    elif tier_bytes(tier) < _LEAST:
        raise ConfigError(f"--kv-disk must be at least {_LEAST >> 20}M", param="--kv-disk")
    if tier.kv_host is not None and device == "cpu":
        raise ConfigError(
            "--kv-host requires a GPU: on a CPU the KV cache is in host memory already. Remove --kv-host, "
            "and enlarge --kv-cache-memory or set --kv-disk",
            param="--kv-host",
        )
    if tier.kv_host is not None and host_bytes(tier) < _LEAST:
        raise ConfigError(f"--kv-host must be at least {_LEAST >> 20}M", param="--kv-host")
    if tier.kv_remote is not None:
        check_url(tier.kv_remote)
    flag = level_flag(tier)
    if not flag:
        return tier
    if not config.cache.enable_prefix_caching:
        raise ConfigError(f"{flag} requires the prefix cache: remove --no-enable-prefix-caching", param=flag)
    if config.transfer.role == "encode":
        raise ConfigError(
            f"{flag}: a group of role encode has no KV cache; set {flag[2:]} for the other groups alone",
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


def host_bytes(tier: TierSection) -> int:
    """Return the bytes of the host level of one rank; 0 without a host level."""
    return parse_size(tier.kv_host) or 0


def level_flag(tier: TierSection) -> str:
    """Return the flag of the first level that is on; "" without a tier."""
    levels = (("--kv-host", tier.kv_host), ("--kv-disk", tier.kv_disk), ("--kv-remote", tier.kv_remote))
    return next((flag for flag, given in levels if given is not None), "")


def _check_no_disk(tier: TierSection) -> None:
    """Raise ConfigError for settings of a disk tier that is off."""
    default = TierSection()
    if not level_flag(tier) and tier.kv_store != default.kv_store:
        raise ConfigError("--kv-store requires --kv-disk, --kv-host or --kv-remote", param="--kv-store")
    for name in ("kv_disk_dir", "kv_disk_ttl", "kv_disk_write_rate", "kv_disk_shared"):
        remote = name in ("kv_disk_ttl", "kv_disk_write_rate") and tier.kv_remote is not None
        if getattr(tier, name) != getattr(default, name) and not remote:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} requires --kv-disk", param=flag)
