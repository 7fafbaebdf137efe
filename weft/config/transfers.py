"""Settings of prefill and decode in different groups that contradict each other, or the rest."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections import ParallelSection, TransferSection


def check_transfer(transfer: TransferSection, parallel: ParallelSection, device: str) -> TransferSection:
    """``transfer``. Raises ConfigError that names the flags at fault and values that would work.

    ``device``: as chosen. What caches lie in for transfers is host memory, of one host.
    """
    prefill, decode, role = transfer.prefill, transfer.decode, transfer.role
    if bool(prefill) != bool(decode):
        given, missing = ("--prefill", "--decode") if prefill else ("--decode", "--prefill")
        raise ConfigError(
            f"{given} {prefill or decode} needs {missing}: groups that prefill hand over to groups that "
            f"decode; give both, as --prefill 1 --decode 1, or neither",
            param=given,
        )
    if role != "unified" and prefill:
        raise ConfigError(
            f"--role {role} is of one group, and --prefill {prefill} --decode {decode} give groups their "
            "roles: leave one of them out",
            param="--role",
        )
    if role == "unified" and not prefill:
        return transfer
    flag = "--prefill" if prefill else "--role"
    named = f"--prefill {prefill} --decode {decode}" if prefill else f"--role {role}"
    if device != "cpu":
        raise ConfigError(
            f"{named} and --device {device}: transfers between groups move caches in a CPU's memory, and "
            "no GPU's yet; use --device cpu, or leave the role out",
            param=flag,
        )
    if parallel.nnodes > 1:
        raise ConfigError(
            f"{named} and --nnodes {parallel.nnodes}: groups with a role lie on one host each, all on the "
            "same; use --nnodes 1",
            param=flag,
        )
    return transfer
