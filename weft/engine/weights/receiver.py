"""One receiver: a process that joins the group of a trainer, and writes tensors into shared memory.

A process of its own, because gloo ends the process after a message that is longer than announced, and nothing
interrupts a NCCL call: the engine kills a receiver that is late, and goes on.
"""

from __future__ import annotations

import json
import re
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from weft.common.errors import ErrorInfo, InvalidRequest, Unavailable, WeftError
from weft.models.ipc import opened
from weft.models.weight_group import WeightGroup, receive
from weft.models.weight_source import write_shared
from weft.types.weights import AnnouncedTensors, ReceiveWeights, TrainerGroup

LINE = b"\n"
_PLACE = re.compile(r"^\[[^\]]*\] ")
"""The line of gloo's source, which its errors begin with."""


class ReceiverSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The message of an engine to its receiver, on standard input."""

    group: TrainerGroup
    rank: int
    writes: bool
    """True for the receiver of an engine that writes the file. The others receive and compare."""
    device: str


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Receiver to engine: one line of JSON."""

    tensors: int = 0
    """Tensors received of the file under way."""
    done: bool = False
    """True after the group was joined, and after each complete file."""
    digest: int = 0
    """CRC-32 over the digests of all tensors of the complete file."""
    error: ErrorInfo | None = None
    """The reason why the receiver ends."""


def serve(link: socket.socket, setup: ReceiverSetup) -> None:
    """Join the group, and carry out one ``ReceiveWeights`` per line of ``link`` until the link closes."""

    def say(progress: Progress) -> None:
        link.sendall(msgspec.json.encode(progress) + LINE)

    try:
        by_name = setup.group.backend == "ipc"
        group = None if by_name else WeightGroup(setup.group, setup.rank, setup.device)
        say(Progress(done=True))
        for line in link.makefile("rb"):
            told = msgspec.json.decode(line, type=ReceiveWeights)
            say(Progress(done=True, digest=_receive(group, told, setup.writes, say)))
    except WeftError as error:
        say(Progress(error=error.info()))
    except OSError as error:
        why = f"the tensors can't be written into shared memory: {error.strerror}"
        say(Progress(error=Unavailable(why).info()))
    except RuntimeError as error:  # of torch: a peer has ended, or a wait has ended
        why = _PLACE.sub("", str(error)).partition(". ")[0].partition("\n")[0][:300]
        say(Progress(error=Unavailable(f"the trainer did not send, or has ended: {why}").info()))
    except Exception as error:
        why = f"a receiver of new weights failed: {type(error).__name__}: {error}"
        say(Progress(error=InvalidRequest(why[:300]).info()))


def _receive(
    group: WeightGroup | None, told: ReceiveWeights, writes: bool, say: Callable[[Progress], None]
) -> int:
    """Receive one file. Return a digest that all receivers have alike."""
    digest = 0
    if (group is None) != bool(told.tensors.handles):
        raise InvalidRequest("ipc_handles belong to the backend ipc, and only to this backend")
    tensors = opened(told.tensors) if group is None else receive(group, told.tensors)

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal digest
        for number, (name, tensor) in enumerate(tensors, 1):
            found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
            digest = zlib.crc32(found.to_bytes(4, "little"), digest)
            yield name, tensor
            say(Progress(tensors=number))

    if writes:
        path = Path(told.file)
        room = _header_bytes(told.tensors)
        write_shared(path.name, counted(), path.parent, replace=False, header_bytes=room)
    else:
        for _ in counted():
            pass
    return digest


def _header_bytes(tensors: AnnouncedTensors) -> int:
    """Return a size that the header of the file does not exceed, unless JSON escapes names twice."""
    return 64 + sum(
        2 * len(json.dumps(name)) + 22 * len(shape) + 130
        for name, shape in zip(tensors.names, tensors.shapes, strict=True)
    )
