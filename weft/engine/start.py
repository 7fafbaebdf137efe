"""From a configuration to an executor: a runner in this process, or a group with this one as its head."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.config.group import shared_settings
from weft.config.hosts import meeting_place, ranks_on
from weft.config.resolved import EngineConfig
from weft.engine.build import build_runner, load, rank_mesh
from weft.engine.domain import Domain, DomainExecutor
from weft.engine.executor import Executor, GroupLost
from weft.engine.faults import Faults
from weft.engine.group import GroupExecutor
from weft.engine.kept import KeptRanks
from weft.engine.ranks import RankProcesses, Ranks, rank_address, ranks_of, threads_each
from weft.engine.regroup import HELLO_S, LOAD_S, TRIES, recall, size
from weft.engine.watch import HeadWatch
from weft.parallel.address import own_address, tcp
from weft.parallel.agreement import AgreementGroup, ZmqBell
from weft.parallel.control import ZmqHead
from weft.parallel.meeting import Meeting
from weft.parallel.secret import read_keys
from weft.types.layout import Layout

CLOSE_S = 5.0


def layout_of(config: EngineConfig) -> Layout:
    """How the model lies over ranks."""
    parallel = config.parallel
    return Layout(
        tensor=parallel.tensor_parallel_size,
        data=parallel.data_parallel_size,
        expert=parallel.enable_expert_parallel,
    )


def start_executor(config: EngineConfig, *, progress: bool = True) -> Executor:
    """The executor of one replica, ready for its first step.

    Raises ConfigError for what cannot be served as configured, and GroupLost when a rank does not come up.
    """
    if layout_of(config).domain == 1:
        return build_runner(config, progress=progress)
    return start_group(config, progress=progress)


def start_group(
    config: EngineConfig, *, progress: bool = True, kept: KeptRanks | None = None
) -> GroupExecutor:
    """Starts the workers of a replica on this host, loads this rank's share, and forms an epoch.

    ``kept``: the workers, where the server keeps them. Those that outlived another head have their weights.
    """
    layout = layout_of(config)
    head, *workers = ranks_of(config.replica, layout.tensor)
    timeout = config.parallel.rank_timeout
    # A head that is killed leaves its files to whoever started it, in whose folder they are.
    folder = (
        Path(tempfile.mkdtemp(prefix="stores-", dir=config.domain)) if config.domain else private_folder()
    )
    undo: list[Callable[[], None]] = [lambda: shutil.rmtree(folder, ignore_errors=True)]
    try:
        channel, beats, host = _channels(config, folder)
        processes: Ranks = kept or RankProcesses(config, channel.address, _level())
        undo.append(lambda: processes.close(CLOSE_S))
        here = ranks_on(config.parallel, config.parallel.node_rank)
        held = [rank for rank in workers if rank in here and processes.spawn(rank)]
        if threads := threads_each(config, layout.tensor):
            torch.set_num_threads(threads)
        faults = Faults(config.faults, head)
        mesh = faults.within(rank_mesh(config, head, host))
        kind = DomainExecutor if layout.domain > layout.tensor else GroupExecutor
        group = kind(
            None,
            mesh,
            channel,
            workers,
            settings=shared_settings(config),
            rank=head,
            rank_timeout=timeout,
            beats=beats.address,
            store_folder=str(folder),
            store_host=host,
        )
        watch = HeadWatch(beats, timeout, group.beat, group.lose, processes.dead)
        group.watch, group.processes, group.on_close = watch, processes, lambda: _undo(undo)
        undo.append(watch.close)
        watch.start()
        recall(group, held, timeout)
        group.gather(HELLO_S, ready=False)
        faults.reach("load")
        first = not held and group.next_epoch == 0  # if it never worked, whoever started it hears why
        loaded = load(config, progress=progress, mesh=mesh)
        group.adopt(faults.around(loaded.runner(size(group, loaded.kv, 1 if first else TRIES))))
        if isinstance(group, DomainExecutor):
            group.enter(*_domain(config, layout))
        try:
            group.gather(LOAD_S)
            group.form(group.next_epoch)
        except GroupLost as lost:
            if first:
                raise
            group.recover(lost)
        return group
    except BaseException:
        _undo(undo)
        raise


def _channels(config: EngineConfig, folder: Path) -> tuple[ZmqHead, ZmqHead, str | None]:
    """(for frames, for beats, this host's address; None where there is no other host)."""
    parallel = config.parallel
    if parallel.nnodes == 1:  # in a server's folder the next head will listen there, too
        ranks = rank_address(config) if config.domain else f"ipc://{folder}/ranks"
        return ZmqHead(ranks), ZmqHead(f"{ranks}.beats"), None
    assert parallel.group_secret is not None, "checked when the configuration was resolved"
    keys = read_keys(parallel.group_secret)
    where, port = meeting_place(parallel)
    host = own_address(where, port)
    return ZmqHead(tcp(host, port), keys), ZmqHead(tcp(host, "*"), keys), host


def _domain(config: EngineConfig, layout: Layout) -> tuple[Domain, Meeting]:
    """Where this replica meets the others. Raises ConfigError."""
    if not config.domain:
        raise ConfigError(
            "--enable-expert-parallel with --data-parallel-size: replicas must be started together",
            param="--data-parallel-size",
        )
    addresses = [f"ipc://{config.domain}/bell{replica}" for replica in range(layout.data)]
    bell = ZmqBell(addresses, config.replica)
    group = AgreementGroup(config.replica, layout.data, bell)
    return Domain(group), Meeting(config.domain, config.replica, layout.data)


def _level() -> str:
    return logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower()


def _undo(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()
