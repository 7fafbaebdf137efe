"""An engine of reads for tests without NIXL: all ranks are in this process, and reads end on demand."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from weft.common.errors import TransportFailed
from weft.disagg.transport.read_engine import Kind, ReadBroken, Segment


class StandInEngine:
    """A ``ReadEngine``. A read copies its bytes at the ``turns``-th check, or not before ``go`` is set."""

    registered: ClassVar[dict[str, list[Segment]]] = {}
    """Name of an engine -> registered memory."""
    turns = 2

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Event()
        self.go.set()
        self.peers: list[str] = []
        self.removed: list[str] = []
        self.under_way: list[list[Any]] = []
        self.broken: ReadBroken | None = None
        """Error of the next check of each read."""
        self.closed = False
        self.registered[name] = []

    def register(self, segments: Sequence[Segment]) -> None:
        self.registered[self.name] += segments

    def metadata(self) -> bytes:
        return self.name.encode()

    def add(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name not in self.registered:
            raise TransportFailed("no such engine")
        self.peers.append(name)
        return name

    def remove(self, peer: str) -> None:
        assert not [read for read in self.under_way if read[1] == peer], "a read is under way"
        self.peers.remove(peer)
        self.removed.append(peer)

    def start(self, peer: str, kind: Kind, source: np.ndarray, to: np.ndarray, to_kind: Kind) -> Any:
        assert peer in self.peers
        if peer not in self.registered:
            raise ReadBroken("the peer has closed", over=True)
        for row in source.tolist():
            assert any(self._inside(row, one, kind) for one in self.registered[peer]), row
        for row in to.tolist():
            assert any(self._inside(row, one, to_kind) for one in self.registered[self.name]), row
        self.under_way.append([self.turns, peer, source, to])
        return self.under_way[-1]

    def ended(self, read: Any) -> bool:
        """See ``ReadEngine``. Memory of a closed peer is still read: the test's process owns the memory."""
        assert any(one is read for one in self.under_way), "a read was used after its end"
        read[0] -= 1
        if self.broken is not None:
            self._forget(read)
            raise self.broken
        if read[0] > 0 or not self.go.is_set():
            return False
        for (address, nbytes, _), (to, _, _) in zip(read[2].tolist(), read[3].tolist(), strict=True):
            ctypes.memmove(to, address, nbytes)
        self._forget(read)
        return True

    def close(self) -> None:
        assert not self.under_way
        self.closed = True
        self.registered.pop(self.name, None)

    def _forget(self, read: Any) -> None:
        self.under_way = [one for one in self.under_way if one is not read]

    @staticmethod
    def _inside(row: list[int], segment: Segment, kind: Kind) -> bool:
        address, nbytes, device = row
        return (
            (segment.kind, segment.device) == (kind, device)
            and segment.address <= address
            and address + nbytes <= segment.address + segment.nbytes
        )


class TensorEngine(StandInEngine):
    """A stand-in for reads between memory of a GPU: copies between tensors that the test has named."""

    tensors: ClassVar[dict[int, Any]] = {}
    """Address -> uint8 tensor, on any device."""

    def ended(self, read: Any) -> bool:
        read[0] -= 1
        if read[0] > 0 or not self.go.is_set():
            return False
        for source, to in zip(read[2].tolist(), read[3].tolist(), strict=True):
            self.copy(self.found(*to[:2]), self.found(*source[:2]))
        self._forget(read)
        return True

    def found(self, address: int, nbytes: int) -> Any:
        """Return the bytes at an address, as a part of a named tensor."""
        for begin, tensor in self.tensors.items():
            if begin <= address and address + nbytes <= begin + tensor.numel():
                return tensor[address - begin : address - begin + nbytes]
        raise AssertionError(f"nothing is named at {address:#x}")

    def copy(self, to: Any, source: Any) -> None:
        to.copy_(source)
        torch.cuda.synchronize()
