"""Check of the settings for disaggregated prefill and decode, and the names of transports: Weft's own, and
those of installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from weft.common.errors import ConfigError
from weft.config.sections.all import ParallelSection, TransferSection

AUTO, SHM, TCP, NIXL = "auto", "shm", "tcp", "nixl"
OWN = (SHM, TCP, NIXL)
GROUP = "weft.transports"
"""Entry-point group for transports of other packages."""
NIXL_MODULES = ("nixl_cu12", "nixl_cu13")
"""Modules of NIXL's wheels, one per CUDA version. Each works without a GPU."""
_FLAG = "--transfer"


def added_transports() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the transports of installed packages by name. Weft's own names cannot be replaced."""
    found = importlib.metadata.entry_points(group=GROUP)
    return {point.name: point for point in found if point.name not in (AUTO, *OWN)}


def check_transport(name: str) -> None:
    """Raise ConfigError for an unknown transport, with all known names."""
    if name in (AUTO, *OWN) or name in (added := added_transports()):
        return
    known = ", ".join((AUTO, *OWN, *sorted(added)))
    raise ConfigError(
        f"{_FLAG} {name}: no such transport; the transports are {known}. Another package adds a transport "
        f"with an entry point in the group {GROUP}",
        param=_FLAG,
    )


def check_installed(name: str) -> None:
    """Raise ConfigError for ``nixl`` without the package."""
    if name == NIXL and not any(map(importlib.util.find_spec, NIXL_MODULES)):
        raise ConfigError(
            f"{_FLAG} {NIXL} needs the package nixl, which is not installed: pip install weft[nixl]",
            param=_FLAG,
        )


def proves_secret(name: str) -> bool:
    """Return True for a transport between processes that prove the group secret."""
    return name not in (AUTO, SHM)


def check_transfer(transfer: TransferSection, parallel: ParallelSection) -> TransferSection:
    """Return ``transfer`` unchanged. Raise ConfigError with the flags at fault and values that would work."""
    check_transport(transfer.transfer)
    prefill, decode, role = transfer.prefill, transfer.decode, transfer.role
    if bool(prefill) != bool(decode):
        given, missing = ("--prefill", "--decode") if prefill else ("--decode", "--prefill")
        raise ConfigError(
            f"{given} {prefill or decode} requires {missing}: prefill groups send their KV caches to "
            "decode groups. Give both flags, as --prefill 1 --decode 1, or neither",
            param=given,
        )
    groups = " ".join(
        f"--{name} {count}"
        for name, count in (("prefill", prefill), ("decode", decode), ("encode", transfer.encode))
        if count
    )
    if role != "unified" and groups:
        raise ConfigError(
            f"--role {role} applies to a single group, and {groups} set the role of each group: remove "
            "one of them",
            param="--role",
        )
    if role in ("decode", "encode") and transfer.take_embeddings:
        raise ConfigError(
            f"--role {role} and --take-embeddings: only groups that compute prompts receive embeddings from "
            "encode groups; remove one of the two flags",
            param="--take-embeddings",
        )
    takes = "--take-embeddings" if transfer.take_embeddings else ""
    if role == "unified" and not groups and not takes:
        return transfer
    check_installed(transfer.transfer)
    # From here on the group has a role, or takes embeddings: transfers limit the use of hosts.
    named = groups or (f"--role {role}" if role != "unified" else takes)
    flag = named.partition(" ")[0]
    if parallel.hosts > 1:
        raise ConfigError(
            f"{named} and --hosts {parallel.hosts}: a group with a role runs on one host. Run several "
            "groups, each on its own host",
            param=flag,
        )
    return transfer
