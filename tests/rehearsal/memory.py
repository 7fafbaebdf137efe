"""Names for pieces of memory, by the storage of a tensor, and the pinned pieces."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Tensor = torch.Tensor

_SWEEP = 20_000
"""Number of new names after which names of freed memory are dropped."""


@dataclass(slots=True)
class Piece:
    """One storage. The piece lives as long as a tensor uses the storage."""

    name: str
    storage: StorageWeakRef
    home: str
    """The stream that was current at the first use, or the host."""
    born: int
    """The number of the piece; later pieces have greater numbers."""
    pinned: bool = False
    known: set[str] = field(default_factory=set)
    """Streams reported to the allocator."""
    users: set[str] = field(default_factory=set)

    @property
    def gone(self) -> bool:
        return bool(self.storage.expired())


class Memory:
    """All pieces of memory of a rehearsal."""

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}
        self._count = itertools.count()
        self._swept = 0
        self.registered: list[tuple[int, int]] = []
        """(address, bytes) of memory that was pinned in place."""
        self.shared: list[Piece] = []
        """Live pieces used by a stream other than the home stream."""

    def piece(self, tensor: Tensor, home: str) -> Piece:
        """Return the piece of ``tensor``. A new piece gets the home ``home``."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        found = self._pieces.get(address)
        if found is None or found.gone:
            number = next(self._count)
            where = "cuda" if tensor.device.type == "cuda" else "host"
            name = f"{where}#{number} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            found = self._pieces[address] = Piece(name, StorageWeakRef(storage), home, number)
            found.pinned = where == "host" and any(
                begin <= storage.data_ptr() < begin + size for begin, size in self.registered
            )
            if number - self._swept > _SWEEP:
                self._swept = number
                self._pieces = {at: piece for at, piece in self._pieces.items() if not piece.gone}
        return found

    def use(self, piece: Piece, actor: str) -> None:
        """Record a use of ``piece`` by ``actor``."""
        if actor not in piece.users:
            piece.users.add(actor)
            if actor != piece.home and piece.home != "host" and piece not in self.shared:
                self.shared.append(piece)

    def freed(self) -> list[Piece]:
        """Return the shared pieces that were freed since the last call."""
        if not self.shared:
            return []
        gone = [piece for piece in self.shared if piece.gone]
        if gone:
            self.shared = [piece for piece in self.shared if not piece.gone]
        return gone

    @property
    def latest(self) -> int:
        """Return the number of the next new piece."""
        number = next(self._count)
        self._count = itertools.chain([number], self._count)  # type: ignore[assignment]
        return number
