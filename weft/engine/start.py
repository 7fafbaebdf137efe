"""From a configuration to an executor: a runner in this process, or a group with this one as its head."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from weft.common.cores import usable_cores
from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.common.log import get_logger
from weft.config.group import shared_settings
from weft.config.hosts import domain_spans, meeting_place, ranks_on, replica_spans, uses_board
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
from weft.parallel.board import BoardClient, board_place
from weft.parallel.control import ZmqHead
from weft.parallel.meeting import BoardSeats, FolderSeats, Meeting, Seats
from weft.parallel.store import host_store
from weft.types.board import control_key
from weft.types.layout import Layout

log = get_logger(__name__)

CLOSE_S = 5.0
PORT_S = 30.0
"""Seconds that the port of ``--rdzv`` may be held by the head before this one, which was killed."""
STORE_S = 30.0
"""Seconds of whatever is done with the store that a first head hosts; those who join say their own."""


def layout_of(config: EngineConfig) -> Layout:
    """How the model lies over ranks."""
    parallel = config.parallel
    return Layout(
        tensor=parallel.tensor_parallel_size,
        data=parallel.data_parallel_size,
        expert=parallel.enable_expert_parallel,
    )


def take_threads(config: EngineConfig) -> None:
    """Gives this process the CPU threads of one rank, and says how many."""
    cores, ranks = usable_cores(), config.parallel.ranks_here
    set_threads(config.runner.threads, threads_each(config, cores))
    log.info("CPU threads: %d (%d cores for %d ranks on this host)", torch.get_num_threads(), cores, ranks)


def set_threads(asked: int | None, most: int | None = None) -> None:
    """Sets the CPU threads of this process's operators: ``asked``, or else at most ``most`` (its cores).

    Never more than torch would take by itself, unless they are asked for: OMP_NUM_THREADS is heeded. torch
    follows the affinity, but takes a thread for each core of the host where a cgroup's quota leaves two.
    """
    torch.set_num_threads(asked or min(usable_cores() if most is None else most, torch.get_num_threads()))


def start_executor(config: EngineConfig, *, progress: bool = True) -> Executor:
    """The executor of one replica, ready for its first step.

    Raises ConfigError for what cannot be served as configured, and GroupLost when a rank does not come up.
    """
    if layout_of(config).domain == 1:
        take_threads(config)
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
    folder = _folder(config)
    undo: list[Callable[[], None]] = [lambda: shutil.rmtree(folder, ignore_errors=True)]
    try:
        channel, beats = _channels(config, folder)
        host = mesh_host(config)
        processes: Ranks = kept or RankProcesses(config, channel.address, _level())
        undo.append(lambda: processes.close(CLOSE_S))
        here = ranks_on(config.parallel, config.parallel.node_rank)
        held = [rank for rank in workers if rank in here and processes.spawn(rank)]
        take_threads(config)
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
            group.enter(*_domain(config, layout, host))
        try:
            group.gather(LOAD_S)
            group.form(group.next_epoch)
        except GroupLost as lost:
            if first and group.epoch <= 0:  # a replica without workers may follow one that worked
                raise
            group.recover(lost)
        return group
    except BaseException:
        _undo(undo)
        raise


def _folder(config: EngineConfig) -> Path:
    """Of this head. One that is killed leaves it to whoever started it, in whose folder it is."""
    return Path(tempfile.mkdtemp(prefix="stores-", dir=config.domain)) if config.domain else private_folder()


def mesh_host(config: EngineConfig) -> str | None:
    """The address that a rank of this replica listens at for collectives; None: only this host reaches it."""
    if not domain_spans(config.parallel, config.replica):
        return None
    return own_address(*meeting_place(config.parallel))


def _channels(config: EngineConfig, folder: Path) -> tuple[ZmqHead, ZmqHead]:
    """(for frames, for beats)."""
    parallel, replica = config.parallel, config.replica
    if not replica_spans(parallel, replica):  # in a server's folder the next head will listen there, too
        ranks = rank_address(config) if config.domain else f"ipc://{folder}/ranks"
        return ZmqHead(ranks), ZmqHead(f"{ranks}.beats")
    place, keys = board_place(parallel)
    where, port = meeting_place(parallel)
    host = own_address(where, port)
    if not uses_board(parallel):  # the only head: everybody knows where it is
        return ZmqHead(rank_address(config), keys, PORT_S), ZmqHead(tcp(host, "*"), keys)
    channel, beats = ZmqHead(tcp(host, "*"), keys), ZmqHead(tcp(host, "*"), keys)
    board = BoardClient(place, keys)
    try:
        board.tell(control_key(replica), channel.address.encode(), HELLO_S)
    finally:
        board.close()
    return channel, beats


def _domain(config: EngineConfig, layout: Layout, host: str | None) -> tuple[Domain, Meeting]:
    """Where this replica meets the others. ``host``: see ``mesh_host``. Raises ConfigError, and CommLost."""
    replica = config.replica
    if host is not None:
        place, keys = board_place(config.parallel)
        bell = ZmqBell(tcp(host, "*"), replica, keys)
        # Epochs meet at a store of the first head, whose life they are named after as well.
        hosted, stores = host_store("", "", host, STORE_S) if not replica else (None, "")
        seats: Seats = BoardSeats(BoardClient(place, keys), replica, layout.data)
    elif config.domain:
        bell = ZmqBell(f"ipc://{config.domain}/bell{replica}", replica)
        hosted, stores = None, f"file://{config.domain}"
        seats = FolderSeats(config.domain, replica, layout.data)
    else:
        raise ConfigError(
            "--enable-expert-parallel with --data-parallel-size: replicas must be started together",
            param="--data-parallel-size",
        )
    group = AgreementGroup(replica, layout.data, bell, host)
    return Domain(group), Meeting(seats, replica, stores, bell.address, hosted)


def _level() -> str:
    return logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower()


def _undo(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()
