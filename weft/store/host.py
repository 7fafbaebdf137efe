"""The host level of a KV tier: records of one rank in host memory, in front of the stores or alone.

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
from weft.store.records import BlockChanges, Owner
from weft.types.tiers import Entry, LevelStats


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
        self._added = list[Entry]()
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
        self._added.append((kind, key))
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

    def take_changes(self) -> BlockChanges:
        """Return the blocks that came and went since the last call."""
        added, gone = dict.fromkeys(self._added), dict.fromkeys(self._gone)
        self._added, self._gone = [], []
        return BlockChanges(
            [one for one in added if self.has(*one)], [one for one in gone if not self.has(*one)]
        )

    def stats(self) -> LevelStats:
        """Return bytes, blocks and evictions."""
        return LevelStats(nbytes=self.nbytes, blocks=sum(map(len, self._records)), evicted=self.evicted)
