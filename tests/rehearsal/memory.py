"""Names for pieces of memory, by the storage behind a tensor, and which of them are pinned."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Tensor = torch.Tensor

_SWEEP = 20_000
"""Names after which those of memory that is gone are dropped."""


@dataclass(slots=True)
class Piece:
    """One storage: it is there as long as a tensor looks at it."""

    name: str
    storage: StorageWeakRef
    home: str
    """The stream that was current when it was first seen, or the host."""
    born: int
    """Its number: later ones are greater."""
    pinned: bool = False
    known: set[str] = field(default_factory=set)
    """Streams that the allocator was told of."""
    users: set[str] = field(default_factory=set)

    @property
    def gone(self) -> bool:
        return bool(self.storage.expired())


class Memory:
    """All pieces that a rehearsal saw."""

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}
        self._count = itertools.count()
        self._swept = 0
        self.registered: list[tuple[int, int]] = []
        """(address, bytes) of memory that was pinned where it is."""
        self.shared: list[Piece] = []
        """Those that another stream than their home used, and that were not reported as freed yet."""

    def piece(self, tensor: Tensor, home: str) -> Piece:
        """The piece behind ``tensor``; ``home`` if it is new."""
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
        """``actor`` uses it."""
        if actor not in piece.users:
            piece.users.add(actor)
            if actor != piece.home and piece.home != "host" and piece not in self.shared:
                self.shared.append(piece)

    def freed(self) -> list[Piece]:
        """Shared pieces that are gone since the last call."""
        if not self.shared:
            return []
        gone = [piece for piece in self.shared if piece.gone]
        if gone:
            self.shared = [piece for piece in self.shared if not piece.gone]
        return gone

    @property
    def latest(self) -> int:
        """The number that the next new piece gets."""
        number = next(self._count)
        self._count = itertools.chain([number], self._count)  # type: ignore[assignment]
        return number
