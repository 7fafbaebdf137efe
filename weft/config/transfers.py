"""Check of the settings for disaggregated prefill and decode."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections.all import ParallelSection, TransferSection


def check_transfer(transfer: TransferSection, parallel: ParallelSection) -> TransferSection:
    """Return ``transfer`` unchanged. Raise ConfigError with the flags at fault and values that would work."""
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
    # From here on the group has a role, or takes embeddings: transfers limit the use of hosts.
    named = groups or (f"--role {role}" if role != "unified" else takes)
    flag = named.partition(" ")[0]
    if parallel.nnodes > 1 and parallel.only_host is None:
        raise ConfigError(
            f"{named} and --nnodes {parallel.nnodes}: a group with a role runs on one host. Use "
            "--nnodes 1, or a topology (weft up FILE) in which the group has only-host: N",
            param=flag,
        )
    if parallel.nnodes > 1 and transfer.transfer == "shm":
        raise ConfigError(
            f"--transfer shm and --nnodes {parallel.nnodes}: groups on different hosts share no memory; "
            "use --transfer tcp or auto",
            param="--transfer",
        )
    return transfer
