"""Distribution of a group's ranks over hosts, and checks of the distribution.

In this module an engine is the engine process of a replica: the rank with place 0. Host 0 is the *head* of
the group. All other hosts join the head.
"""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections.all import ParallelSection


def check_hosts(parallel: ParallelSection) -> ParallelSection:
    """Return ``parallel`` unchanged.

    Raise ConfigError with the flags if the hosts cannot work together as configured.
    """
    hosts, tensor = parallel.hosts, parallel.tensor_parallel_size
    if hosts == 1:
        return parallel
    if parallel.group_secret is None:
        raise ConfigError("--hosts above 1 requires --group-secret FILE", param="--group-secret")
    if parallel.data_parallel_size > 1 and not parallel.enable_expert_parallel:
        raise ConfigError(
            f"--hosts {hosts}: replicas without --enable-expert-parallel share nothing. List one group for "
            "each replica (count: N), and run `weft engine` for each",
            param="--hosts",
        )
    ranks = parallel.layout.ranks
    if ranks % hosts:
        raise ConfigError(
            f"--hosts {hosts} does not divide the {ranks} ranks of --tensor-parallel-size {tensor} and "
            f"--data-parallel-size {parallel.data_parallel_size}",
            param="--hosts",
        )
    each = ranks // hosts
    if each % tensor and tensor % each:
        raise ConfigError(
            f"--hosts {hosts}: a host has {each} ranks, which are neither whole replicas of {tensor} ranks "
            "nor an equal part of one replica",
            param="--hosts",
        )
    return parallel


def refuse_hosts(parallel: ParallelSection, what: str = "--hosts") -> None:
    """Raise ConfigError if the ranks lie on several hosts: one process on one host cannot start the group.
    Raise the same for labels of Ray's nodes."""
    if parallel.ray_labels:
        raise ConfigError(
            "--ray-labels: labels choose among nodes of Ray: start the groups with `weft up FILE --on ray`",
            param="--ray-labels",
        )
    if parallel.hosts > 1:
        raise ConfigError(
            f"{what} {parallel.hosts}: run `weft engine FILE --group NAME` on each host of the group, and "
            "`weft front FILE` (docs/parallel.md)",
            param="--hosts",
        )


def ranks_on(parallel: ParallelSection, host: int) -> range:
    """Return the ranks of ``host``: equal contiguous shares."""
    each = parallel.ranks_here
    return range(host * each, min((host + 1) * each, parallel.layout.ranks))


def host_of(parallel: ParallelSection, rank: int) -> int:
    """Return the host of ``rank``."""
    return rank // parallel.ranks_here


def engine_of(parallel: ParallelSection, rank: int) -> int:
    """Return the engine's rank in the replica of ``rank``."""
    return rank - parallel.layout.place(rank)


def engines_on(parallel: ParallelSection, host: int) -> list[int]:
    """Return the replicas with an engine on ``host``. A host has engines, or only ranks of other hosts'
    engines."""
    layout = parallel.layout
    return [layout.replica(rank) for rank in ranks_on(parallel, host) if not layout.place(rank)]


def replica_spans(parallel: ParallelSection, replica: int) -> bool:
    """Return True if the ranks of ``replica`` are on several hosts."""
    first = replica * parallel.tensor_parallel_size
    last = first + parallel.tensor_parallel_size - 1
    return host_of(parallel, first) != host_of(parallel, last)


def expert_group_spans(parallel: ParallelSection, replica: int) -> bool:
    """Return True if ``replica`` exchanges tensors between hosts."""
    return parallel.hosts > 1 if parallel.enable_expert_parallel else replica_spans(parallel, replica)
