"""Check of the settings for disaggregated prefill and decode."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections.all import ParallelSection, TransferSection


def check_transfer(transfer: TransferSection, parallel: ParallelSection) -> TransferSection:
    """Return ``transfer``. Raise ConfigError with the flags at fault and values that would work."""
    prefill, decode, role = transfer.prefill, transfer.decode, transfer.role
    if bool(prefill) != bool(decode):
        given, missing = ("--prefill", "--decode") if prefill else ("--decode", "--prefill")
        raise ConfigError(
            f"{given} {prefill or decode} needs {missing}: groups that prefill hand over to groups that "
            f"decode; give both, as --prefill 1 --decode 1, or neither",
            param=given,
        )
    groups = " ".join(
        f"--{name} {count}"
        for name, count in (("prefill", prefill), ("decode", decode), ("encode", transfer.encode))
        if count
    )
    if role != "unified" and groups:
        raise ConfigError(
            f"--role {role} is of one group, and {groups} give groups their roles: leave one of them out",
            param="--role",
        )
    if role == "encode" and transfer.take_embeddings:
        raise ConfigError(
            "--role encode and --take-embeddings: what encodes images for others takes none from others; "
            "leave one of them out",
            param="--take-embeddings",
        )
    takes = "--take-embeddings" if transfer.take_embeddings else ""
    if role == "unified" and not groups and not takes:
        return transfer
    # From here on the group has a role, or takes embeddings: transfers limit the use of hosts.
    named = groups or (f"--role {role}" if role != "unified" else takes)
    flag = named.partition(" ")[0]
    if parallel.nnodes > 1 and parallel.only_host is None:
        raise ConfigError(
            f"{named} and --nnodes {parallel.nnodes}: a group with a role lies on one host: write a topology "
            "(weft up FILE) in which it has only-host: N, or use --nnodes 1",
            param=flag,
        )
    if parallel.nnodes > 1 and transfer.transfer == "shm":
        raise ConfigError(
            f"--transfer shm and --nnodes {parallel.nnodes}: groups on other hosts share no memory; use "
            "--transfer tcp, or auto",
            param="--transfer",
        )
    return transfer
