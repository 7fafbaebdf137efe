"""Ranks and the GPUs of their host: which rank has which, and what cannot be.

The ranks of a host get its GPUs in order, one each, those of one group after those of another. A rank's
process sees no other GPU, by CUDA_VISIBLE_DEVICES, so in every rank the device is torch's first.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.hosts import ranks_on
from weft.config.resolved import EngineConfig, HostShare
from weft.config.sections import ParallelSection


def gpus_here(parallel: ParallelSection, device: str) -> tuple[str, ...]:
    """This host's, for ranks on ``device``. Raises ConfigError, naming the flags, when they cannot run so."""
    if device != "cuda":
        if parallel.collectives == "nccl":
            raise ConfigError(
                "--collectives nccl: NCCL connects GPUs, and these ranks are on a CPU; use auto or gloo",
                param="--collectives",
            )
        return ()
    gpus = devices.gpus()
    ranks = len(ranks_on(parallel, parallel.node_rank))
    if ranks <= max(len(gpus), 1) or parallel.collectives == "gloo":
        return gpus
    flag = "--tensor-parallel-size"
    if parallel.data_parallel_size > 1:
        flag += " or --data-parallel-size"
    have = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    raise ConfigError(
        f"{ranks} ranks on this host, which has {have} (CUDA_VISIBLE_DEVICES counts): NCCL needs one for "
        f"each rank. Lower {flag}, use --device cpu, or have ranks share GPUs with --collectives gloo (slow)",
        param="--collectives" if parallel.collectives == "nccl" else flag.partition(" ")[0],
    )


def gpus_of_group(gpus: Sequence[str], parallel: ParallelSection, host: HostShare) -> tuple[str, ...]:
    """The GPUs, of this host's ``gpus``, that a group's ranks have, in order: they follow those of the groups
    before it and, where there are fewer GPUs than ranks, begin again with the first.
    """
    if not host.ranks:
        return tuple(gpus)
    mine = min(len(gpus), len(ranks_on(parallel, parallel.node_rank)))
    return tuple(gpus[(host.first + number) % len(gpus)] for number in range(mine))


def sharers(parallel: ParallelSection, gpus: Sequence[str], host: HostShare = HostShare()) -> int:
    """Ranks of this host that have the same GPU, at most. ``gpus``: the group's."""
    if host.ranks:
        return -(-host.ranks // max(host.gpus, 1))
    return -(-len(ranks_on(parallel, parallel.node_rank)) // max(len(gpus), 1))


def gpu_of(parallel: ParallelSection, gpus: Sequence[str], rank: int) -> str:
    """Which of this host's ``gpus`` its ``rank`` has."""
    return gpus[(rank - ranks_on(parallel, parallel.node_rank).start) % len(gpus)]


def gpu_environment(config: EngineConfig, rank: int) -> dict[str, str]:
    """What the process of ``rank`` has in its environment besides; nothing where it is the only rank."""
    alone = config.parallel.layout.ranks == 1 and not config.host.ranks
    if config.device != "cuda" or not config.gpus or alone:
        return {}
    return {"CUDA_VISIBLE_DEVICES": gpu_of(config.parallel, config.gpus, rank)}


def head_rank(config: EngineConfig) -> int:
    """The rank of the replica's head."""
    return config.replica * config.parallel.tensor_parallel_size
