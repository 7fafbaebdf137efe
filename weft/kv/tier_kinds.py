"""The blocks of one KV cache group that a tier stores and loads."""

from __future__ import annotations

from collections.abc import Container, Sequence

from weft.config.resolved import PoolSpec
from weft.kv.cache_groups import CacheGroup
from weft.kv.pool import NULL_BLOCK


class TierKind:
    """One KV cache group, as a tier sees the group: which keys a sequence needs to continue from a position.

    Full groups need all blocks before the position. Windows need the blocks of the window, and chunks the
    blocks of the last chunk. Recurrent states need one snapshot at the position.
    """

    def __init__(self, group: CacheGroup, spec: PoolSpec, base_block: int) -> None:
        self._pool = group.pool
        self._size = spec.block_size
        self._ratio = spec.block_size // base_block
        self._window = spec.cache.window
        self._chunk = spec.cache.kind == "chunk"
        self._state = spec.cache.kind == "state"
        self.every = not (self._state or self._window)
        """True if a sequence needs every block of a prefix. Then a shorter prefix needs a part of the same
        blocks."""

    def has(self, key: bytes) -> bool:
        """Return True if the pool has the block."""
        return self._pool.find(key) != NULL_BLOCK

    def needed(self, hashes: Sequence[bytes], position: int) -> Sequence[bytes]:
        """Return the keys of the blocks that a sequence reads after a hit of ``position`` tokens.

        ``position`` must be a multiple of the block size.
        """
        end = position // self._size
        if self._state:
            return self._keys(hashes, end - 1, end) if end else ()
        return self._keys(hashes, self._first_read(position), end)

    def resident(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the keys of all blocks of ``hashes`` in the pool."""
        return [key for key in self._keys(hashes, 0, len(hashes) // self._ratio) if self.has(key)]

    def hit(self, hashes: Sequence[bytes], disk: Container[bytes], limit: int) -> int:
        """Return the longest prefix, at most ``limit``, from which a sequence can continue with the blocks of
        the pool and of ``disk``. In tokens."""
        end = min(limit // self._size, len(hashes) // self._ratio)
        if self._state:
            keys = self._keys(hashes, 0, end)
            ends = (number for number in range(end, 0, -1) if self._is_stored(keys[number - 1], disk))
            return next(ends, 0) * self._size
        if not self._window:
            keys = self._keys(hashes, 0, end)
            count = next((at for at, key in enumerate(keys) if not self._is_stored(key, disk)), len(keys))
            return count * self._size
        while end > 0:
            first = self._first_read(end * self._size)
            backwards = self._keys(hashes, first, end)[::-1]
            missing = next((at for at, key in enumerate(backwards) if not self._is_stored(key, disk)), -1)
            if missing < 0:
                break
            end -= missing + 1  # all hits in between read the missing block, too
        return max(end, 0) * self._size

    def _is_stored(self, key: bytes, disk: Container[bytes]) -> bool:
        """Return True if the pool or ``disk`` has the block."""
        return key in disk or self._pool.find(key) != NULL_BLOCK

    def _first_read(self, position: int) -> int:
        """Return the index of the first block read by a token at ``position``."""
        if self._chunk:
            return (position - position % self._window) // self._size
        return max(0, position - self._window + 1) // self._size if self._window else 0

    def _keys(self, hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """Return the keys of blocks ``first`` .. end - 1: the hash of the last base block of each."""
        return hashes[(first + 1) * self._ratio - 1 : end * self._ratio : self._ratio]
