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


def transport_names(value: str) -> list[str]:
    """Return the transports in a value of ``--transfer``: one name, or a list such as ``shm,nixl,tcp``."""
    return [name.strip() for name in value.split(",")]


def check_transport(value: str) -> None:
    """Raise ConfigError for an unknown transport, with all known names, and for a list with repetitions or
    with names other than Weft's own."""
    names = transport_names(value)
    if len(names) > 1:
        if len(set(names)) < len(names) or not set(names) <= set(OWN):
            raise ConfigError(
                f"{_FLAG} {value}: a list has each of {', '.join(OWN)} at most once, and no other name",
                param=_FLAG,
            )
        return
    (name,) = names
    if name in (AUTO, *OWN) or name in (added := added_transports()):
        return
    known = ", ".join((AUTO, *OWN, *sorted(added)))
    raise ConfigError(
        f"{_FLAG} {name}: no such transport; the transports are {known}. Another package adds a transport "
        f"with an entry point in the group {GROUP}",
        param=_FLAG,
    )


def has_nixl() -> bool:
    """Return True if the package of NIXL is installed."""
    return any(map(importlib.util.find_spec, NIXL_MODULES))


def check_installed(value: str) -> None:
    """Raise ConfigError for ``nixl`` without the package. A list is accepted: the pairs of engines use its
    other transports."""
    if value == NIXL and not has_nixl():
        raise ConfigError(
            f"{_FLAG} {NIXL} needs the package nixl, which is not installed: pip install weft[nixl]",
            param=_FLAG,
        )


def proves_secret(value: str) -> bool:
    """Return True if a transport of the value connects processes that prove the group secret."""
    return any(name not in (AUTO, SHM) for name in transport_names(value))


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
