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
        found = self._by_first.get(self._first_of(tokens, client))
        return found is not None and found.salt != salt

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
        made = Remembered(sequence, salt, root, array("i", tokens), list(hashes), computed)
        made.first = self._first_of(tokens, client)
        made.cost = RECORD_COST + 4 * len(tokens) + BLOCK_COST * len(hashes)
        self._supersede(made)
        self._records[sequence] = made
        self.bytes += made.cost
        for key in made.hashes:
            self._by_key[key] = made
        self._by_root.setdefault(root, deque(maxlen=CANDIDATES)).append(made)
        if made.first:
            self._by_first[made.first] = made
        while self.bytes > self._most and self._records:
            self._forget(next(iter(self._records.values())))

    def reached(self, sequence: int, computed: int) -> None:
        """Record the number of cached positions of a remembered sequence. Unknown sequences are ignored."""
        found = self._records.get(sequence)
        if found is not None:
            found.computed = max(found.computed, computed)

    def _supersede(self, made: Remembered) -> None:
        """Forget the longest remembered prefix of ``made``, if its positions were computed, and take over the
        number of computed positions."""
        for depth in range(len(made.hashes), 0, -1):
            found = self._by_key.get(made.hashes[depth - 1])
            if found is None:
                continue
            # A sequence without computed positions may still run; explanations need the record meanwhile.
            if len(found.hashes) == depth and found.computed:
                made.computed = max(made.computed, min(found.computed, depth * self._block))
                self._forget(found)
            return

    def _forget(self, record: Remembered) -> None:
        """Remove a record from the memory and from all indices that name the record."""
        del self._records[record.sequence]
        self.bytes -= record.cost
        for key in record.hashes:
            if self._by_key.get(key) is record:
                del self._by_key[key]
        same = self._by_root.get(record.root)
        if same is not None and record in same:  # else not among the latest
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
    """Return the first differing position from ``start`` on; the length of the shorter one if there is
    none."""
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
