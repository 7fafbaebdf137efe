"""Names, owners and memory of records.

A record is one part of one block of the KV cache on disk. A block has one part for each rank of the group
that wrote the block.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import NamedTuple

import numpy as np

PAGE = 4096
"""Alignment of records, in bytes: enough for O_DIRECT on every usual disk."""
KEY_BYTES = 16
_HUGE = 2 << 20


class RecordId(NamedTuple):
    """Name of a record within a namespace."""

    kind: int
    """Number of the KV cache group, 0 .. 65535."""
    key: bytes
    """16 bytes: the hash of the block, see ``weft.kv.hashing``."""
    part: int = 0
    """The rank that wrote the record."""
    parts: int = 1
    """Number of ranks of the group that wrote the block."""


class Owner(NamedTuple):
    """Owner of a record. Only hashes of the three names reach the disk."""

    payer: str = ""
    """Hash of the API key; "" without keys."""
    salt: str = ""
    session: str = ""


class Stored(NamedTuple):
    """A complete block on disk."""

    kind: int
    key: bytes
    parts: int
    """Number of parts. The records are ``RecordId(kind, key, part, parts)``."""
    nbytes: int
    """Bytes of all parts together."""
    written: float
    """Time of the oldest part, in seconds since the epoch."""


class Changes(NamedTuple):
    """Records that came and went."""

    added: list[RecordId]
    gone: list[RecordId]


class BlockChanges(NamedTuple):
    """Blocks, (KV cache group, hash) each, that came and went."""

    added: list[tuple[int, bytes]]
    gone: list[tuple[int, bytes]]
    whole: bool = False
    """True if all earlier blocks are gone, too."""


class RecordBuffer:
    """Page-aligned memory for one record of at most ``nbytes`` bytes. A buffer serves one call at a time.

    The page before the payload is for the header, so that one system call moves both. The memory begins at a
    huge page: O_DIRECT pins pages one by one, and 1 page in place of 193 reads 1.6 times as fast.
    """

    def __init__(self, nbytes: int) -> None:
        padded = -(-nbytes // PAGE) * PAGE
        # One huge page more than needed, so that a huge page can begin inside.
        self._map = mmap.mmap(-1, PAGE + padded + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        begin = -whole.ctypes.data % _HUGE
        self.memory = whole[begin : begin + PAGE + padded]
        """uint8 [PAGE + padded payload]: header and payload."""
        self.payload = self.memory[PAGE : PAGE + nbytes]
        """uint8 [nbytes], writable."""
