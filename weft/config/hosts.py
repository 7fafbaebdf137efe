"""Ranks that are spread over several hosts: which are where, and what that takes."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections import ParallelSection


def check_hosts(parallel: ParallelSection) -> ParallelSection:
    """``parallel``. Raises ConfigError, naming the flags, when the hosts cannot work as they are given."""
    if parallel.node_rank >= parallel.nnodes:
        raise ConfigError(
            f"--node-rank {parallel.node_rank}: with --nnodes {parallel.nnodes} the last host is "
            f"{parallel.nnodes - 1}",
            param="--node-rank",
        )
    if parallel.nnodes == 1:
        return parallel
    if parallel.rdzv is None or parallel.group_secret is None:
        raise ConfigError(
            "--nnodes over 1 needs --rdzv HOST:PORT, where ranks meet on host 0, and --group-secret FILE",
            param="--rdzv" if parallel.rdzv is None else "--group-secret",
        )
    meeting_place(parallel)
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            "--nnodes with --data-parallel-size: replicas over several hosts are not there yet; spread one "
            "replica with --tensor-parallel-size, or start one server on each host",
            param="--data-parallel-size",
        )
    if parallel.tensor_parallel_size % parallel.nnodes:
        raise ConfigError(
            f"--tensor-parallel-size {parallel.tensor_parallel_size} does not divide over --nnodes "
            f"{parallel.nnodes}",
            param="--tensor-parallel-size",
        )
    return parallel


def meeting_place(parallel: ParallelSection) -> tuple[str, int]:
    """(host, port) of ``--rdzv``. Raises ConfigError."""
    host, _, port = (parallel.rdzv or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("--rdzv: expected HOST:PORT", param="--rdzv")
    return host.strip("[]"), int(port)


def ranks_on(parallel: ParallelSection, node: int) -> range:
    """The ranks of host ``node``: as many on each, in order."""
    each = parallel.ranks_here
    return range(node * each, min((node + 1) * each, parallel.layout.ranks))
