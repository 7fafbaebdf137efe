"""A rank's part in transfers between groups, from its configuration: memory, transport, thread.

Only in a group with a role; any other has none of it.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import ExitStack
from typing import Literal

import msgspec
import torch

from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.config.hosts import meeting_place
from weft.config.resolved import EngineConfig, KVConfig
from weft.engine.ranks import ranks_of
from weft.parallel.address import own_address
from weft.parallel.secret import check_secret, read_secret
from weft.runner.exports import RankRooms
from weft.transfer.group_layout import group_dims
from weft.transports.reports import RoomReports
from weft.transports.shared_memory import SharedMemory
from weft.transports.shm import ShmTransport
from weft.transports.sockets import SocketTransport
from weft.transports.tcp import TcpTransport
from weft.transports.worker import RankTransfer
from weft.types.rooms import GroupDims

LOOPBACK = "127.0.0.1"


def transport_of(config: EngineConfig) -> Literal["shm", "tcp"]:
    """What moves the group's caches."""
    asked = config.transfer.transfer
    if asked != "auto":
        return asked
    return "shm" if config.parallel.nnodes == 1 else "tcp"


def check_rooms(config: EngineConfig) -> None:
    """Raises ConfigError for a group with a role that cannot move its caches; before weights are loaded."""
    if config.transfer.role == "unified":
        return
    if config.device != "cpu":
        raise ConfigError(
            f"--role {config.transfer.role} moves caches in a CPU's memory only: use --device cpu, or "
            "--role unified",
            param="--role",
        )
    if transport_of(config) == "tcp":
        check_secret(_secret(config))


def _secret(config: EngineConfig) -> bytes:
    file = config.parallel.group_secret
    if file is None:
        raise ConfigError(
            "--transfer tcp needs --group-secret FILE, which all groups share: caches go to nobody else",
            param="--group-secret",
        )
    return read_secret(file)


def dims_of(config: EngineConfig, kv: KVConfig) -> GroupDims:
    """The caches of the group as rooms describe them. ``kv``: of a rank, with the pools that it has."""
    pairs = zip(kv.pools, config.spec.caches, strict=True)
    whole = tuple(msgspec.structs.replace(pool, cache=cache) for pool, cache in pairs)
    return group_dims(
        msgspec.structs.replace(kv, pools=whole),
        kv,
        config.parallel.layout.tensor,
        config.dtype,
        snapshots=True,
    )


def open_rooms(config: EngineConfig, kv: KVConfig, rank: int) -> RankRooms | None:
    """What ``rank`` (of all replicas' ranks) moves caches with, of pools ``kv``; None in a group without a
    role. Its socket lies in the folder of its group's (``EngineConfig.domain``), which outlives a rank that
    is killed and is removed by its owner; without one, in a folder of its own.

    Raises ConfigError.
    """
    if config.transfer.role == "unified":
        return None
    check_rooms(config)
    number = rank - ranks_of(config.replica, config.parallel.layout.tensor)[0]
    with ExitStack() as resources:
        regions, memory = [], []
        for pool in kv.pools:
            tensors = []
            for layout in pool.tensors(config.dtype):
                region = SharedMemory(layout.nbytes)
                resources.callback(region.close)
                regions.append(region)
                tensors.append(region.tensor.view(getattr(torch, layout.dtype)).view(layout.shape))
            memory.append(tensors)
        transport = _transport(config, number, regions, resources)
        reports = RoomReports()
        resources.callback(reports.close)
        transfer = RankTransfer(number, dims_of(config, kv), transport, reports.tell)
        resources.callback(transfer.close)
        return RankRooms(
            transfer=transfer,
            reports=reports,
            endpoint=transport.endpoint,
            memory=memory,
            close=resources.pop_all().close,
        )


def _transport(
    config: EngineConfig, number: int, regions: list[SharedMemory], resources: ExitStack
) -> SocketTransport:
    incarnation = secrets.randbits(63)
    if transport_of(config) == "tcp":
        parallel = config.parallel
        host = LOOPBACK if parallel.rdzv is None else own_address(*meeting_place(parallel))
        tcp = TcpTransport(host, number, incarnation, _secret(config))
        tcp.register([region.tensor for region in regions])
        return tcp
    folder = config.domain
    if not folder:
        folder = str(private_folder())
        resources.callback(shutil.rmtree, folder, ignore_errors=True)
    shm = ShmTransport(folder, number, incarnation)
    shm.share(regions)
    return shm
