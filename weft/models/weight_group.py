"""A process group in which a trainer broadcasts new weights to a server: both ends.

    trainer, rank 0                                 receivers of the server, ranks rank_offset ..
      WeightGroup(group, 0)  ◄──── TCP store ────►    WeightGroup(group, rank)
      send(group, tensors, announced) ───────────►    receive(group, announced): the same order, the same cuts

The group is apart from every other group of the process (``torch.distributed`` need not be initialized). Over
gloo the group is torch's own. Over nccl the set-up is that of vLLM's trainers: the identifier of the
communicator in the TCP store, and one all-reduce of a single number.
"""

from __future__ import annotations

import os
import pickletools
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from weft.common.errors import InvalidRequest, Unavailable
from weft.store.announced import broadcasts
from weft.types.weights import AnnouncedTensors, TrainerGroup

_ID_KEY = "broadcast_from/0/0"
"""Key of the TCP store with the identifier of a NCCL communicator, as vLLM's trainers name the key."""
_ID_BYTES = 128
_AGAIN_S = 0.1
"""Seconds between two attempts to reach a trainer."""
_MARK = 16
"""Random bytes at the end of a buffer. Their change proves that a broadcast has filled the buffer."""
_LEAST_MARK = 8
"""Buffers with fewer bytes are not marked: random bytes could equal the sent bytes."""


class WeightGroup:
    """One member of the group. Use from one thread."""

    def __init__(self, group: TrainerGroup, rank: int, device: str = "cpu") -> None:
        """Block until all ranks have joined. ``device``: of the tensors of this member.

        Raises RuntimeError if not all ranks join within ``group.seconds``, and Unavailable if the trainer
        does not listen.
        """
        self.device = device
        if rank:
            _await_trainer(group)
        self._timeout = timedelta(seconds=group.seconds)
        # vLLM's trainers wait in their store until all ranks have counted themselves.
        self._store = distributed.TCPStore(
            group.address, group.port, group.world_size, rank == 0, self._timeout, True
        )
        self._gloo: Any = None
        if group.backend == "gloo":
            place = distributed.PrefixStore(f"tcp://{group.address}:{group.port}", self._store)
            self._gloo = distributed.ProcessGroupGloo(place, rank, group.world_size, self._timeout)
        else:
            self._communicator = _join_nccl(self._store, group.world_size, rank, device)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send the contiguous ``tensor`` from rank 0, or receive into ``tensor``. Blocks.

        Raises RuntimeError if rank 0 has ended, or after ``TrainerGroup.seconds`` over gloo. A NCCL broadcast
        without its sender never returns: the owner of the process ends the process.
        """
        if self._gloo is None:
            torch.cuda.nccl.broadcast([tensor], 0, None, [self._communicator])
            torch.cuda.current_stream(tensor.device).synchronize()
            return
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._gloo.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()


def _await_trainer(group: TrainerGroup) -> None:
    """Block until the trainer listens: torch prints a page of addresses after a time-out of its own."""
    until = time.monotonic() + group.seconds
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection((group.address, group.port), max(0.1, left)).close()
            return
        except OSError as error:
            if left < _AGAIN_S:
                raise Unavailable(
                    f"the trainer did not listen at {group.address}:{group.port} within {group.seconds:g} s"
                ) from error
        time.sleep(_AGAIN_S)


def announce(
    tensors: Iterable[tuple[str, torch.Tensor]], packed: bool = False, buffer_bytes: int = 1 << 30
) -> AnnouncedTensors:
    """Return the announcement of ``tensors``, with a digest of each."""
    names, dtypes, shapes, digests = [], [], [], []
    for name, tensor in tensors:
        names.append(name)
        dtypes.append(str(tensor.dtype).removeprefix("torch."))
        shapes.append(tuple(tensor.shape))
        digests.append(zlib.crc32(_bytes_of(tensor).cpu().numpy().data))
    return AnnouncedTensors(
        names=tuple(names),
        dtypes=tuple(dtypes),
        shapes=tuple(shapes),
        digests=tuple(digests),
        packed=packed,
        buffer_bytes=buffer_bytes,
    )


def update_info(announced: AnnouncedTensors) -> dict[str, Any]:
    """Return the field ``update_info`` of POST /update_weights."""
    return {
        "names": list(announced.names),
        "dtype_names": list(announced.dtypes),
        "shapes": [list(one) for one in announced.shapes],
        "digests": list(announced.digests),
        "packed": announced.packed,
        "packed_buffer_size_bytes": announced.buffer_bytes,
    }


def send(
    group: WeightGroup, tensors: Sequence[tuple[str, torch.Tensor]], announced: AnnouncedTensors
) -> None:
    """Broadcast ``tensors`` in order, while POST /update_weights runs. Raises RuntimeError."""
    for pieces in broadcasts(announced):
        some = [tensors[index][1].detach() for index, _ in pieces]
        if announced.packed:
            group.broadcast(torch.cat([_bytes_of(one) for one in some]).to(group.device))
        else:
            group.broadcast(some[0].contiguous().to(group.device))


def receive(group: WeightGroup, announced: AnnouncedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor in host memory) in the announced order. A tensor is valid until the next one.

    Raises InvalidRequest for tensors with other bytes than announced, Unavailable without memory for a
    broadcast, and RuntimeError: see ``broadcast``.
    """
    for pieces in broadcasts(announced):
        last = announced.names[pieces[-1][0]]
        total = sum(count for _, count in pieces)
        try:
            buffer = torch.empty(total, dtype=torch.uint8, device=group.device)
        except RuntimeError as error:
            raise Unavailable(f"no memory for a broadcast of {total} bytes, up to tensor {last}") from error
        mark = torch.frombuffer(bytearray(os.urandom(_MARK)), dtype=torch.uint8)[-total:].to(group.device)
        buffer[-mark.numel() :] = mark
        # NCCL counts elements of the sender's type.
        group.broadcast(buffer if announced.packed else buffer.view(_type_of(announced, pieces[0][0])))
        if total >= _LEAST_MARK and torch.equal(buffer[-mark.numel() :], mark):
            # A short message fills the front of a buffer, and raises no error.
            raise InvalidRequest(f"the trainer sent fewer bytes than announced, up to tensor {last}")
        yield from _cut(buffer.cpu(), pieces, announced)


def _cut(
    buffer: torch.Tensor, pieces: list[tuple[int, int]], announced: AnnouncedTensors
) -> Iterator[tuple[str, torch.Tensor]]:
    at = 0
    for index, count in pieces:
        name = announced.names[index]
        # A copy, because a type needs a start that is a multiple of its size.
        part = buffer[at : at + count].clone() if announced.packed else buffer
        at += count
        if announced.digests and zlib.crc32(part.numpy().data) != announced.digests[index]:
            raise InvalidRequest(f"tensor {name} arrived with other bytes than its digest says")
        yield name, part.view(_type_of(announced, index)).view(announced.shapes[index])


def _type_of(announced: AnnouncedTensors, index: int) -> torch.dtype:
    found: torch.dtype = getattr(torch, announced.dtypes[index])
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _join_nccl(store: distributed.TCPStore, world_size: int, rank: int, device: str) -> Any:
    """Return a communicator on the current GPU. Blocks. Raises RuntimeError."""
    nccl = torch.cuda.nccl
    torch.cuda.set_device(device)
    if rank == 0:
        name = nccl.unique_id()
        store.set(_ID_KEY, name)
    else:
        name = communicator_id(store.get(_ID_KEY))
    made = nccl.init_rank(world_size, name, rank)
    number = torch.zeros(1, device=device)
    nccl.all_reduce([number], comms=[made])
    torch.cuda.current_stream(number.device).synchronize()
    return made


def communicator_id(data: bytes) -> bytes:
    """Return the 128 bytes that name a NCCL communicator. Raises InvalidRequest for other data.

    ``data``: the bytes alone, or vLLM's pickle of a C structure with the bytes. The pickle is searched for
    constants, and never executed.
    """
    if len(data) == _ID_BYTES:
        return data
    try:
        found = [arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, bytes)]
    except Exception as error:  # the data of a peer may be anything
        raise InvalidRequest("the trainer's store names no NCCL communicator") from error
    found = [one for one in found if len(one) == _ID_BYTES]
    if len(found) != 1:
        raise InvalidRequest("the trainer's store names no NCCL communicator")
    return found[0]
