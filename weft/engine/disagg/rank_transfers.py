"""A rank's part in transfers between groups, built from the configuration: memory, transport, thread.

Only for a group with the role ``prefill``, ``decode`` or ``encode``, or with embeddings of other groups. KV
transfers and embedding transfers are separate: each has separate memory, transport and thread.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import torch

from weft.common import env
from weft.common.folder import private_folder
from weft.config.cache_layout import TensorLayout
from weft.config.resolved import EngineConfig, KVConfig
from weft.config.secret_file import check_secret, read_secret
from weft.config.transfers import (
    AUTO,
    NIXL,
    SHM,
    TCP,
    check_installed,
    has_nixl,
    proves_secret,
    transport_names,
)
from weft.disagg.protocol.group_layout import embedding_dims, group_dims
from weft.disagg.transport.base import Transport
from weft.disagg.transport.copies import Copies, HostCopies
from weft.disagg.transport.device_memory import DeviceWork
from weft.disagg.transport.private_memory import huge_memory
from weft.disagg.transport.reports import TransferReports
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.staging_memory import Sizes, Staged
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.disagg.transport.transport_registry import TransportKind, TransportPlace, open_set, transport_kind
from weft.engine.ranks.ranks import ranks_of
from weft.runner.exports import RankTransfers
from weft.runner.kv_tensors import zeros
from weft.types.transfer import GroupDims

LOOPBACK = "127.0.0.1"


def transports_of(config: EngineConfig) -> tuple[str, ...]:
    """Return the transports of the group's caches in order of preference. Each pair of engines uses one.

    ``auto`` is ``shm`` and ``tcp``. A group without an address for other hosts needs ``shm`` alone. A list
    with ``nixl`` loses ``nixl`` where the package is not installed.
    """
    asked = config.transfer.transfer
    if asked == AUTO:
        return (SHM,) if config.parallel.advertise is None else (SHM, TCP)
    names = transport_names(asked)
    if len(names) > 1 and NIXL in names and not has_nixl():
        names.remove(NIXL)
    return tuple(names)


def check_transfers(config: EngineConfig) -> None:
    """Raise ConfigError for an unusable secret, or a transport without its package.

    Groups without transfers are ignored. Called before weights are loaded.
    """
    role, takes = config.transfer.role, config.transfer.take_embeddings
    if role == "unified" and not takes:
        return
    check_installed(config.transfer.transfer)
    names = transports_of(config)
    for name in filter(proves_secret, names):
        check_secret(read_secret(config.parallel.group_secret, name))


def dims_of(config: EngineConfig, kv: KVConfig) -> GroupDims:
    """Return the dimensions of the group's caches for transfers. ``kv``: the KV configuration of a rank, with
    final pool sizes.
    """
    pairs = zip(kv.pools, config.spec.caches, strict=True)
    whole = tuple(msgspec.structs.replace(pool, cache=cache) for pool, cache in pairs)
    return group_dims(
        msgspec.structs.replace(kv, pools=whole),
        kv,
        config.parallel.layout.tensor,
        config.dtype,
        snapshots=True,
    )


def embeddings_of(config: EngineConfig) -> Literal["sends", "takes"] | None:
    """Return the group's part in transfers of image embeddings, or None."""
    if config.kv.media is None:
        return None
    if config.transfer.role == "encode":
        return "sends"
    return "takes" if config.kv.media.takes else None


def embedding_dims_of(config: EngineConfig) -> GroupDims:
    """Return the dimensions of the group's embedding pool for transfers. Requires a model with images."""
    limits = config.kv.media
    assert limits is not None
    levels, ranks = 1 + limits.levels, config.parallel.layout.tensor
    return embedding_dims(levels, limits.width, limits.blocks, ranks, config.dtype, limits.shards)


def open_transfers(config: EngineConfig, kv: KVConfig, rank: int) -> RankTransfers | None:
    """Return the KV transfers of ``rank`` (a global rank) over the pools of ``kv``. None unless the role is
    ``prefill`` or ``decode``. See ``_opened``.
    """
    if config.transfer.role not in ("prefill", "decode"):
        return None
    layouts = [pool.tensors(config.dtype) for pool in kv.pools]
    return _opened(config, rank, dims_of(config, kv), layouts, sends=config.transfer.role == "prefill")


def open_embeddings(config: EngineConfig, rank: int) -> RankTransfers | None:
    """Return the embedding transfers of ``rank`` (a global rank). None in a group without embedding
    transfers. The memory is the rank's embedding pool: one tensor, [layer, block, position, width]. See
    ``_opened``.
    """
    does = embeddings_of(config)
    if does is None:
        return None
    dims = embedding_dims_of(config)
    tensor = dims.kinds[0].tensors[0]
    layout = TensorLayout(tensor.name, tensor.dims, tensor.dtype)
    return _opened(config, rank, dims, [(layout,)], sends=does == "sends")


def _opened(
    config: EngineConfig,
    rank: int,
    dims: GroupDims,
    layouts: Sequence[Sequence[TensorLayout]],
    *,
    sends: bool,
) -> RankTransfers:
    """Allocate the memory of a rank's caches, open the transport and return both as ``RankTransfers``.

    ``layouts``: for each KV cache group of ``dims`` the tensors of a rank. ``sends``: True if the rank sends,
    False if the rank receives.

    The socket lies in the group's socket folder (``EngineConfig.socket_folder``). The owner of the folder
    removes the folder, also after a rank was killed. Without the folder the socket lies in a private folder.
    Raises ConfigError.
    """
    check_transfers(config)
    # Transfers number the ranks of a group from 0.
    number = rank - ranks_of(config.replica, config.parallel.layout.tensor)[0]
    with ExitStack() as resources:
        caches = _caches(config, layouts, resources, sends=sends)
        transport = _transport(config, number, caches, resources, sends=sends)
        reports = TransferReports()
        resources.callback(reports.close)
        transfer = RankTransfer(number, dims, transport, reports.tell)
        resources.callback(transfer.close)
        return RankTransfers(
            transfer=transfer,
            reports=reports,
            endpoint=transport.endpoint,
            memory=caches.memory,
            reports_during_steps=number == 0 and config.transfer.role == "prefill",
            close=resources.pop_all().close,
        )


class _Caches(NamedTuple):
    memory: list[list[torch.Tensor]]
    """Tensors of each KV cache group."""
    regions: list[torch.Tensor]
    """The tensors as flat bytes, uint8 [bytes], in the same order."""
    shared: list[SharedMemory]
    """Shared memory of the tensors, in the same order, if peers map the memory; else empty."""
    staged: list[Staged | None]
    """For each transport the staging memory on the host, or None if peers read the caches directly."""


def is_staged(config: EngineConfig) -> bool:
    """Return True if transfers pass through a ring of host memory, as always for caches on a GPU."""
    return config.device != "cpu" or env.get("WEFT_STAGED_POOLS") == "1"


def _caches(
    config: EngineConfig, layouts: Sequence[Sequence[TensorLayout]], resources: ExitStack, *, sends: bool
) -> _Caches:
    """Allocate zeroed memory for all tensors of ``layouts``: shared memory, or device memory plus a staging
    ring. ``resources`` closes shared memory.
    """
    memory, shared, flat = list[list[torch.Tensor]](), list[SharedMemory](), list[torch.Tensor]()
    staged, device = is_staged(config), torch.device(config.device)
    transports = [transport_kind(name) for name in transports_of(config)]
    mapped = any(transport.shared for transport in transports)
    for kind in layouts:
        tensors = []
        # The transport sees each staged tensor as flat bytes, [nbytes].
        for layout in kind:
            dtype = getattr(torch, layout.dtype)
            # Peers cannot map staged memory: all bytes go through a ring of host memory.
            if staged:
                tensors.append(zeros(layout.shape, dtype, device))
                flat.append(tensors[-1].view(-1).view(torch.uint8))
            elif mapped:
                region = SharedMemory(layout.nbytes)
                resources.callback(region.close)
                shared.append(region)
                flat.append(region.tensor)
                tensors.append(region.tensor.view(dtype).view(layout.shape))
            else:
                flat.append(huge_memory(layout.nbytes))
                tensors.append(flat[-1].view(dtype).view(layout.shape))
        memory.append(tensors)
    if not staged:
        return _Caches(memory, flat, shared, [None] * len(transports))
    direct = device.type == "cuda"
    staging = [
        None if direct and transport.device else _staged(flat, transport, sends=sends)
        for transport in transports
    ]
    return _Caches(memory, flat, [], staging)


def _staged(regions: Sequence[torch.Tensor], transport: TransportKind, *, sends: bool) -> Staged:
    """Return staging memory for one transport. ``regions``: flat caches, all on one device."""
    sizes = Sizes(slot=transport.slot_bytes)
    device, most = regions[0].device, max(sizes.slot, sizes.inbox)
    copies: Copies = DeviceWork(device, most) if device.type == "cuda" else HostCopies()
    return Staged(regions, copies, sizes, sends=sends, takes=not sends)


def _transport(
    config: EngineConfig, number: int, caches: _Caches, resources: ExitStack, *, sends: bool
) -> Transport:
    """Open the transports of ``transports_of`` over ``caches`` and return them as one transport.

    ``number``: of the rank within the group. ``resources`` removes a private socket folder. The caller closes
    the transport.
    """
    parallel, names = config.parallel, transports_of(config)
    number_of_start = secrets.randbits(63)

    def folder() -> str:
        if config.socket_folder:
            return config.socket_folder
        made = str(private_folder())
        resources.callback(shutil.rmtree, made, ignore_errors=True)
        return made

    places = [
        TransportPlace(
            rank=number,
            incarnation=number_of_start,
            host=lambda: parallel.advertise or LOOPBACK,
            secret=partial(read_secret, parallel.group_secret, name),
            folder=folder,
            sends=sends,
            regions=caches.regions if staged is None else [],
            shared=caches.shared,
            staged=staged,
            ring=partial(_staged, caches.regions, transport_kind(name), sends=sends),
        )
        for name, staged in zip(names, caches.staged, strict=True)
    ]
    return open_set(names, places)
