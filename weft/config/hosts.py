"""Distribution of ranks over hosts, and checks of the distribution.

In this module an engine is the engine process of a replica: the rank with place 0.
"""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections.all import ParallelSection


def check_hosts(parallel: ParallelSection) -> ParallelSection:
    """Return ``parallel`` unchanged.

    Raise ConfigError with the flags if the hosts cannot work together as configured.
    """
    if parallel.node_rank >= parallel.nnodes:
        raise ConfigError(
            f"--node-rank {parallel.node_rank}: with --nnodes {parallel.nnodes} the last host is "
            f"{parallel.nnodes - 1}",
            param="--node-rank",
        )
    if parallel.only_host is not None and parallel.only_host >= parallel.nnodes:
        raise ConfigError(
            f"--only-host {parallel.only_host}: with --nnodes {parallel.nnodes} the last host is "
            f"{parallel.nnodes - 1}",
            param="--only-host",
        )
    if parallel.ray_labels:
        raise ConfigError(
            "--ray-labels: labels choose among nodes of Ray: start the groups with `weft up FILE --on ray`",
            param="--ray-labels",
        )
    # A single host needs no rendezvous.
    if parallel.nnodes == 1:
        return parallel
    if parallel.rdzv is None or parallel.group_secret is None:
        raise ConfigError(
            "--nnodes above 1 requires --rdzv HOST:PORT, where the ranks connect to host 0, and "
            "--group-secret FILE",
            param="--rdzv" if parallel.rdzv is None else "--group-secret",
        )
    meeting_place(parallel)
    ranks = parallel.layout.ranks
    if parallel.only_host is not None:
        return parallel
    if ranks % parallel.nnodes:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} does not divide the {ranks} ranks of --tensor-parallel-size "
            f"{parallel.tensor_parallel_size} and --data-parallel-size {parallel.data_parallel_size}",
            param="--nnodes",
        )
    return parallel


def meeting_place(parallel: ParallelSection) -> tuple[str, int]:
    """Return (host, port) of ``--rdzv``. Raise ConfigError."""
    host, _, port = (parallel.rdzv or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("--rdzv: expected HOST:PORT", param="--rdzv")
    return host.strip("[]"), int(port)


def ranks_on(parallel: ParallelSection, node: int) -> range:
    """Return the ranks of host ``node``: equal contiguous shares, or all ranks with --only-host."""
    if parallel.only_host is not None:
        return range(parallel.layout.ranks if node == parallel.only_host else 0)
    each = parallel.ranks_here
    return range(node * each, min((node + 1) * each, parallel.layout.ranks))


def host_of(parallel: ParallelSection, rank: int) -> int:
    """Return the host of ``rank``."""
    if parallel.only_host is not None:
        return parallel.only_host
    return rank // parallel.ranks_here


def engine_of(parallel: ParallelSection, rank: int) -> int:
    """Return the engine's rank in the replica of ``rank``."""
    return rank - parallel.layout.place(rank)


def engines_on(parallel: ParallelSection, node: int) -> list[int]:
    """Return the replicas with an engine on host ``node``."""
    layout = parallel.layout
    return [layout.replica(rank) for rank in ranks_on(parallel, node) if not layout.place(rank)]


def workers_on(parallel: ParallelSection, node: int) -> list[int]:
    """Return the ranks of host ``node`` with an engine on another host.

    An engine starts the workers of its host.
    """
    return [r for r in ranks_on(parallel, node) if host_of(parallel, engine_of(parallel, r)) != node]


def replica_spans(parallel: ParallelSection, replica: int) -> bool:
    """Return True if the ranks of ``replica`` are on several hosts."""
    first = replica * parallel.tensor_parallel_size
    last = first + parallel.tensor_parallel_size - 1
    return host_of(parallel, first) != host_of(parallel, last)


def expert_group_spans(parallel: ParallelSection, replica: int) -> bool:
    """Return True if ``replica`` exchanges tensors between hosts."""
    several = parallel.nnodes > 1 and parallel.only_host is None
    return several if parallel.enable_expert_parallel else replica_spans(parallel, replica)


def uses_board(parallel: ParallelSection) -> bool:
    """Return True if engines may run on several hosts, and meet by the rendezvous store on host 0."""
    if parallel.only_host is not None:
        return parallel.only_host > 0
    return parallel.nnodes > 1 and parallel.data_parallel_size > 1


def has_ranks(parallel: ParallelSection) -> bool:
    """Return True if this host has any ranks."""
    return bool(ranks_on(parallel, parallel.node_rank))
