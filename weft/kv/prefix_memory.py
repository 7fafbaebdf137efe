"""A memory of recent prompts, bounded in bytes, to explain why a prompt was not found in the cache.

The memory has ids and block hashes of sequences, whether or not the blocks are still cached. If a prompt
differs from a remembered sequence, the memory has the other ids.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b

BLOCK_COST = 256
"""Approximate bytes for the key of a block."""
RECORD_COST = 1024
"""Approximate bytes of a sequence without its ids and keys."""
CANDIDATES = 8
"""Number of latest sequences per salt for a comparison from the first token on."""


@dataclass(slots=True, eq=False)
class Remembered:
    """A remembered sequence. Compared by identity."""

    sequence: int
    salt: str
    root: bytes
    """Root hash: the parent of the first block's hash."""
    tokens: array[int]
    hashes: list[bytes]
    """Hashes of the full blocks."""
    computed: int = 0
    """Number of leading positions ever in the cache. A running sequence may have more."""
    first: bytes = b""
    """Hash of the client and the ids of the first block, without the salt."""
    cost: int = field(default=RECORD_COST)


class PrefixMemory:
    """The latest sequences, at most ``most_bytes`` bytes. Pure: no clock, no I/O."""

    def __init__(self, block_size: int, most_bytes: int) -> None:
        self._block = block_size
        self._most = most_bytes
        self._records: OrderedDict[int, Remembered] = OrderedDict()
        self._by_key: dict[bytes, Remembered] = {}
        """Block hash -> the latest sequence with the block."""
        self._by_root: dict[bytes, deque[Remembered]] = {}
        self._by_first: dict[bytes, Remembered] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def having(self, key: bytes) -> Remembered | None:
        """Return the latest sequence with the block ``key``, or None."""
        return self._by_key.get(key)

    def under_another_salt(self, tokens: array[int], salt: str, client: int = 0) -> bool:
        """Return True if ``client`` has sent the first block of ``tokens`` under another salt than ``salt``.

        Prompts of other clients are never compared: salts hide prompts.
        """
        record = self._by_first.get(self._first_of(tokens, client))
        return record is not None and record.salt != salt

    def nearest(self, root: bytes, tokens: array[int]) -> tuple[Remembered, int] | None:
        """Return (sequence, common leading tokens) of the closest of the latest sequences under ``root``, or
        None."""
        each = [(_common(one.tokens, tokens, 0), one) for one in self._by_root.get(root, ())]
        if not each:
            return None
        length, best = max(each, key=lambda pair: pair[0])
        return best, length

    def remember(
        self, sequence: int, salt: str, root: bytes, tokens: array[int], hashes: list[bytes], client: int = 0
    ) -> None:
        """Remember a sequence, or a longer version of a remembered sequence. May forget the oldest sequences.

        A remembered prefix of the sequence is forgotten, except a prefix without computed positions.
        """
        before = self._records.get(sequence)
        computed = before.computed if before is not None else 0
        if before is not None:
            self._forget(before)
        record = Remembered(sequence, salt, root, array("i", tokens), list(hashes), computed)
        record.first = self._first_of(tokens, client)
        record.cost = RECORD_COST + 4 * len(tokens) + BLOCK_COST * len(hashes)
        self._supersede(record)
        self._records[sequence] = record
        self.bytes += record.cost
        for key in record.hashes:
            self._by_key[key] = record
        self._by_root.setdefault(root, deque(maxlen=CANDIDATES)).append(record)
        if record.first:
            self._by_first[record.first] = record
        while self.bytes > self._most and self._records:
            self._forget(next(iter(self._records.values())))

    def reached(self, sequence: int, computed: int) -> None:
        """Record the number of cached positions of a remembered sequence. Unknown sequences are ignored."""
        record = self._records.get(sequence)
        if record is not None:
            record.computed = max(record.computed, computed)

    def _supersede(self, record: Remembered) -> None:
        """Forget the longest remembered prefix of ``record``, if positions of the prefix were computed. Add
        these positions to ``record.computed``."""
        for depth in range(len(record.hashes), 0, -1):
            prefix = self._by_key.get(record.hashes[depth - 1])
            if prefix is None:
                continue
            # A sequence without computed positions may still run; explanations need its record until then.
            if len(prefix.hashes) == depth and prefix.computed:
                record.computed = max(record.computed, min(prefix.computed, depth * self._block))
                self._forget(prefix)
            return

    def _forget(self, record: Remembered) -> None:
        """Remove a record from the memory and from all indices that name the record."""
        del self._records[record.sequence]
        self.bytes -= record.cost
        for key in record.hashes:
            if self._by_key.get(key) is record:
                del self._by_key[key]
        same = self._by_root.get(record.root)
        if same is not None and record in same:  # older records have left the bounded list
            same.remove(record)
            if not same:
                del self._by_root[record.root]
        if self._by_first.get(record.first) is record:
            del self._by_first[record.first]

    def _first_of(self, tokens: array[int], client: int) -> bytes:
        """Return the hash of ``client`` and the first block's ids; b"" if no block is full."""
        if len(tokens) < self._block:
            return b""
        return blake2b(
            client.to_bytes(8, "little") + tokens[: self._block].tobytes(), digest_size=16
        ).digest()


def _common(one: array[int], other: array[int], start: int) -> int:
    """Return the first position from ``start`` on at which both arrays differ; the length of the shorter
    array if there is no such position."""
    most = min(len(one), len(other))
    at = start
    while at < most:  # compare pieces of 256 as bytes
        end = min(at + 256, most)
        if one[at:end] != other[at:end]:
            return next(place for place in range(at, end) if one[place] != other[place])
        at = end
    return most


def first_difference(one: array[int], other: array[int], start: int) -> int | None:
    """Return the first position from ``start`` on at which both differ; None if one is a prefix of the
    other."""
    at = _common(one, other, start)
    return at if at < min(len(one), len(other)) else None
