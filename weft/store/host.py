"""The host level of a KV tier: records of one rank in host memory, in front of the disk or alone.

The memory is divided among the KV cache groups in proportion to the pools, and the part of each group into
slots of one record. A full group evicts the least recently used record. Bytes in host memory are trusted as
the bytes of the pool are: records have no digest. One thread uses the level.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.store import layout
from weft.store.errors import RecordGone
from weft.store.reading import Run
from weft.store.records import BlockChanges, Owner, RecordBuffer, RecordId, Stored
from weft.store.settings import StoreStats
from weft.types.tiers import Entry


class _Record(NamedTuple):
    slot: int
    nbytes: int
    owner: layout.OwnerHashes
    """Hashes, as on the disk: a record that comes from the disk has no other names."""


_NOBODY = layout.owner_hashes(Owner())


class HostLevel:
    """Records in ``memory``."""

    def __init__(self, memory: np.ndarray, sizes: Sequence[int], shares: Sequence[int]) -> None:
        """memory: uint8 [bytes]. ``sizes``: bytes of the largest record of each KV cache group, 0 for a group
        without records. ``shares``: bytes of the pool of each group."""
        self._sizes, self._parts = sizes, list[np.ndarray]()
        at, total = 0, max(1, sum(share for share, size in zip(shares, sizes, strict=True) if size))
        for size, share in zip(sizes, shares, strict=True):
            count = len(memory) * share // total // size if size else 0
            self._parts.append(memory[at : at + count * size].reshape(count, max(size, 1)))
            at += count * size
        self._free = [list(range(len(part))) for part in self._parts]
        self._records = [OrderedDict[bytes, _Record]() for _ in sizes]
        self._gone = list[Entry]()
        self.evicted = 0
        self.nbytes = 0
        """Bytes of all records."""

    def has(self, kind: int, key: bytes) -> bool:
        """Return True if the block is there."""
        return key in self._records[kind]

    def get(self, kind: int, key: bytes) -> np.ndarray | None:
        """Return the bytes of a block, uint8 [bytes], valid until the next ``put``; None without the
        block."""
        found = self._records[kind].get(key)
        if found is None:
            return None
        self._records[kind].move_to_end(key)
        return self._parts[kind][found.slot, : found.nbytes]

    def put(self, kind: int, key: bytes, payload: np.ndarray, owner: layout.OwnerHashes = _NOBODY) -> bool:
        """Copy a block, uint8 [bytes], unless the block is there. May evict. Return False without room.
        ``owner``: see ``layout.owner_hashes``."""
        records, free = self._records[kind], self._free[kind]
        if key in records:
            records.move_to_end(key)
            return True
        if len(payload) > self._sizes[kind] or not len(self._parts[kind]):
            return False
        if not free:
            lost, record = records.popitem(last=False)
            free.append(record.slot)
            self.nbytes -= record.nbytes
            self._gone.append((kind, lost))
            self.evicted += 1
        slot = free.pop()
        self._parts[kind][slot, : len(payload)] = payload
        records[key] = _Record(slot, len(payload), owner)
        self.nbytes += len(payload)
        return True

    def flush(self, payer: str | None, salt: str | None, session: str | None) -> int:
        """Remove the records whose owner has all given fields; without fields, all. Return the number."""
        given = {"payer": payer, "salt": salt, "session": session}
        wanted = [None if one is None else layout.owner_hash(name, one) for name, one in given.items()]
        count = 0
        for kind, records in enumerate(self._records):
            for key, record in list(records.items()):
                if all(want is None or want == has for want, has in zip(wanted, record.owner, strict=True)):
                    del records[key]
                    self._parts[kind][record.slot] = 0
                    self.nbytes -= record.nbytes
                    self._free[kind].append(record.slot)
                    self._gone.append((kind, key))
                    count += 1
        return count

    def take_gone(self) -> list[Entry]:
        """Return the blocks that were evicted or flushed since the last call, and are not there again."""
        gone, self._gone = self._gone, []
        return [(kind, key) for kind, key in dict.fromkeys(gone) if not self.has(kind, key)]

    @property
    def num_records(self) -> int:
        return sum(map(len, self._records))


class NoDisk:
    """The place of the disk under a host level alone. Has no records and takes none."""

    off = ""

    def find(self, kind: int, key: bytes) -> Stored | None:
        return None

    def write(self, record: RecordId, buffer: RecordBuffer, nbytes: int, owner: Owner = Owner()) -> str:
        return "none"

    def read_run(self, records: Sequence[RecordId], buffer: RecordBuffer) -> Run:
        return Run(records[:1], [], buffer, 0, RecordGone("no disk"))

    def check_run(self, run: Run) -> list[np.ndarray | Exception]:
        return [] if run.error is None else [run.error]

    def take_changes(self) -> BlockChanges:
        return BlockChanges([], [])

    def flush(self, *, payer: str | None = None, salt: str | None = None, session: str | None = None) -> int:
        return 0

    def stats(self) -> StoreStats:
        return StoreStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {})

    def scan(self) -> None:
        return

    def maintain(self) -> None:
        return

    def close(self) -> None:
        return
