"""Assignment of a host's GPUs to ranks, and checks of the assignment.

The ranks of a host get GPUs in order, one GPU per rank, group after group. CUDA_VISIBLE_DEVICES hides all
other GPUs from a rank's process, so the device is always torch's first device.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.hosts import ranks_on
from weft.config.resolved import EngineConfig, HostShare
from weft.config.sections.all import ParallelSection


def gpus_here(parallel: ParallelSection, device: str, index: int = 0) -> tuple[str, ...]:
    """Return the GPUs of this host for ranks on ``device``; () for a CPU. ``index``: number of this host.

    Raise ConfigError with the flags if the ranks cannot run on the GPUs.
    """
    if device != "cuda":
        if parallel.collectives == "nccl":
            raise ConfigError(
                "--collectives nccl: NCCL connects GPUs, and these ranks are on a CPU; use auto or gloo",
                param="--collectives",
            )
        return ()
    gpus = devices.gpus()
    ranks = len(ranks_on(parallel, index))
    if ranks <= max(len(gpus), 1) or parallel.collectives == "gloo":
        return gpus
    flag = "--tensor-parallel-size"
    if parallel.data_parallel_size > 1:
        flag += " or --data-parallel-size"
    have = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    raise ConfigError(
        f"{ranks} ranks need {ranks} GPUs with NCCL, and this host has {have} (CUDA_VISIBLE_DEVICES "
        f"counts). Lower {flag}, use --device cpu, or let ranks share GPUs with --collectives gloo "
        "(slow)",
        param="--collectives" if parallel.collectives == "nccl" else flag.partition(" ")[0],
    )


def gpus_of_group(gpus: Sequence[str], parallel: ParallelSection, host: HostShare) -> tuple[str, ...]:
    """Return the GPUs of a group's ranks on this host, in rank order.

    GPUs of earlier groups in the server are skipped. With fewer GPUs than ranks, the assignment wraps around.
    """
    if not host.ranks:
        return tuple(gpus)
    mine = min(len(gpus), len(ranks_on(parallel, host.index)))
    return tuple(gpus[(host.first + number) % len(gpus)] for number in range(mine))


def sharers(parallel: ParallelSection, gpus: Sequence[str], host: HostShare = HostShare()) -> int:
    """Return the maximum number of ranks per GPU on this host. ``gpus``: the group's GPUs."""
    if host.ranks:
        return -(-host.ranks // max(host.gpus, 1))
    return -(-len(ranks_on(parallel, host.index)) // max(len(gpus), 1))


def gpu_of(parallel: ParallelSection, gpus: Sequence[str], rank: int, index: int = 0) -> str:
    """Return the GPU of ``rank`` among ``gpus``. ``index``: number of this host."""
    return gpus[(rank - ranks_on(parallel, index).start) % len(gpus)]


def gpu_environment(config: EngineConfig, rank: int) -> dict[str, str]:
    """Return the extra environment variables for the process of ``rank``; none for a lone rank."""
    alone = config.parallel.layout.ranks == 1 and not config.host.ranks
    if config.device != "cuda" or not config.gpus or alone:
        return {}
    return {"CUDA_VISIBLE_DEVICES": gpu_of(config.parallel, config.gpus, rank, config.host.index)}


def engine_rank(config: EngineConfig) -> int:
    """Return the rank of the replica's engine process."""
    return config.replica * config.parallel.tensor_parallel_size
