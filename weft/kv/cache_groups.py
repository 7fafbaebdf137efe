"""KV cache groups: how the layers of one group use their pool, behind one interface.

The content of an entry (keys and values, a latent, a compressed group of positions) does not matter here.
Groups differ in the stored entries: every entry (``FullGroup``), the last entries (``WindowGroup``), or no
entries but snapshots at some boundaries (``weft.kv.snapshots``).

    positions   0 .......... hit ........ committed ...... scheduled ....... reserved
    blocks      shared, read only | own, full, inserted  | own, being written | own, empty

The hit and every block in the prefix cache are committed and immutable. Insertion into the prefix cache and
sliding go by committed lengths; reservation goes by upper bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from weft.common.errors import ConfigError
from weft.config.resolved import PoolSpec
from weft.kv.pool import NULL_BLOCK, BlockPool
from weft.types.plan import AppendBlocks, AppendEach, SlotUpdate, column
from weft.types.transfer import Blocks


class CacheGroup(Protocol):
    """The interface of a KV cache group to the scheduler. Lengths are in tokens from the start of the
    sequence.

    A slot has a block table from ``acquire`` to ``release``. ``hashes`` are the hashes of the leading full
    base blocks of the sequence. Before ``acquire`` and ``reserve``, ``needed`` must have been at most
    ``available``.

    A sequence with KV from another group (``weft.types.transfer``) has a table from ``fetch`` to ``adopt`` or
    ``release``. The table has a negative number in place of a slot.
    """

    block_size: int
    num_blocks: int
    slides: bool
    """True if ``slide`` may ever release blocks."""
    pool: BlockPool
    """The pool. Others may only pin blocks and retain contents; everything else goes through the group."""

    def available(self) -> int:
        """Return the number of blocks available to ``acquire`` and ``reserve`` now."""

    def pending(self) -> int:
        """Return the number of additional blocks available when the steps in flight have committed."""

    def hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """Return the longest prefix, at most ``limit``, after which a sequence can continue from the
        cache."""

    def needed(self, slot: int, upto: int, num_hit: int = 0, hashes: Sequence[bytes] = ()) -> int:
        """Return the free blocks needed to extend the slot's table to ``upto``, at most at one time.

        For a slot without a table, ``num_hit`` tokens come from the cache. Cached blocks without references
        count as needed, because a reference makes such blocks unavailable.
        """

    def acquire(self, slot: int, hashes: Sequence[bytes], num_hit: int, upto: int) -> list[SlotUpdate]:
        """Create the slot's table: the blocks of a hit, and new blocks up to ``upto``. Return the slot
        updates."""

    def reserve(self, slot: int, upto: int) -> list[SlotUpdate]:
        """Extend the slot's table to ``upto``. Return the slot updates."""

    def short(self, slots: Sequence[int], upto: Sequence[int]) -> list[int]:
        """Return the number of missing blocks to extend each slot's table to ``upto``."""

    def grow(self, slots: Sequence[int], short: Sequence[int]) -> list[SlotUpdate]:
        """Extend many slots at once, each by ``short`` blocks. Return the slot updates."""

    def cut(self, start: int, end: int) -> int:
        """Return where a chunk from ``start`` must end: ``end``, or earlier (but after ``start``)."""

    def insert(self, slot: int, committed: int, hashes: Sequence[bytes]) -> None:
        """Insert the full blocks below ``committed`` into the prefix cache, as far as ``hashes`` reaches.
        Idempotent."""

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        """Release blocks not read from position ``committed`` on, after ``after_step`` has committed."""

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        """Slide many slots. Each slot must have committed exactly one position since the last slide."""

    def release(self, slot: int, after_step: int) -> None:
        """Drop the table. The blocks are free when ``after_step`` has committed."""

    def names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys of the blocks needed to continue from a prefix. Some may not be cached."""

    def committed(self, step: int) -> None:
        """Note the commit of ``step`` and all earlier steps."""

    def reset(self) -> None:
        """Drop all tables and cached contents. Pinned blocks stay out of use."""

    def most(self, upto: int) -> int:
        """Return the maximum blocks in use at one time by a sequence of ``upto`` tokens that never waits."""

    def least(self, upto: int) -> int:
        """Return the minimum pool size with which one sequence alone reaches ``upto`` tokens."""

    def fetch_hit(self, hashes: Sequence[bytes], limit: int, position: int) -> int:
        """Return the longest prefix, at most ``limit``, with all entries read by a token at ``position`` in
        the pool."""

    def fetch_needed(self, hashes: Sequence[bytes], start: int, position: int, upto: int) -> int:
        """Return the free blocks needed by ``fetch``."""

    def fetch(
        self,
        fetch: int,
        hashes: Sequence[bytes],
        start: int,
        position: int,
        upto: int,
        sent_block: int,
    ) -> Blocks:
        """Create the table ``fetch`` for a token at ``position``, up to ``upto``. Return the new blocks.

        Entries before ``start`` come from the cache. Positions ``start`` .. position - 1 come from a group
        with blocks of ``sent_block`` positions (``weft.disagg.protocol.spans.first_position``) and go into
        the new blocks.
        """

    def adopt(self, fetch: int, slot: int) -> list[SlotUpdate]:
        """Make the table ``fetch`` the table of ``slot``. Return the slot updates."""

    def table(self, slot: int, position: int) -> Blocks:
        """Return the table entries of ``slot`` read by a token at ``position``, as far as allocated."""


def blocks_of(table: Sequence[int], first: int) -> Blocks:
    """Return entries of a block table as ``Blocks``. ``first``: index of the first entry."""
    return Blocks(first=first, ids=np.asarray(table, "<i4").tobytes())


def ids_of(blocks: Blocks) -> list[int]:
    """Return the block ids of ``blocks``; the inverse of ``blocks_of``."""
    ids: list[int] = np.frombuffer(blocks.ids, "<i4").tolist()
    return ids


class _Table:
    __slots__ = ("blocks", "inserted", "live")

    def __init__(self, blocks: list[int], live: int, inserted: int) -> None:
        self.blocks = blocks
        self.live = live  # entries before are null: slid out, or never allocated
        self.inserted = inserted  # entries before are inserted or shared, or will never be inserted


class FullGroup:
    """Every position reads all positions before: a sequence uses all blocks from admission to release.

    A block size counts source positions, also if one entry stands for ``ratio`` positions. A block is a whole
    number of base blocks and of such entries. So a hit, which has only full blocks, never ends inside an
    entry.
    """

    slides = False

    def __init__(self, number: int, spec: PoolSpec, base_block: int) -> None:
        if spec.block_size % base_block:
            raise ConfigError(
                f"a cache kind's block of {spec.block_size} is no multiple of --block-size {base_block}"
            )
        if spec.block_size % spec.cache.ratio:
            raise ConfigError(
                f"a cache kind's block of {spec.block_size} is no multiple of its {spec.cache.ratio} "
                "positions an entry"
            )
        self.number = number
        self.block_size = spec.block_size
        self.num_blocks = spec.num_blocks
        self._ratio = spec.block_size // base_block
        self.pool = BlockPool(spec.num_blocks)
        self._tables: dict[int, _Table] = {}

    def available(self) -> int:
        return self.pool.available()

    def pending(self) -> int:
        return self.pool.pending()

    def hit(self, hashes: Sequence[bytes], limit: int) -> int:
        most = min(limit // self.block_size, len(hashes) // self._ratio)
        return self.pool.leading(self._keys(hashes, 0, most)) * self.block_size

    def needed(self, slot: int, upto: int, num_hit: int = 0, hashes: Sequence[bytes] = ()) -> int:
        table = self._tables.get(slot)
        if table is not None:
            return max(0, self._blocks(upto) - len(table.blocks))
        # Hits without references leave `available` too, so only hits in use cost nothing.
        return self._blocks(upto) - self._first_read(num_hit) - self._held(hashes, num_hit)

    def acquire(self, slot: int, hashes: Sequence[bytes], num_hit: int, upto: int) -> list[SlotUpdate]:
        first = self._first_read(num_hit)
        hits = num_hit // self.block_size
        blocks = [NULL_BLOCK] * first + [self.pool.find(key) for key in self._keys(hashes, first, hits)]
        # All hits leave the LRU list before a new block can evict a hit.
        for block in blocks[first:]:
            self.pool.share(block)
        self._tables[slot] = _Table(blocks, first, hits)
        ops: list[SlotUpdate] = []
        if blocks:
            ops.append(AppendBlocks(slot=slot, kind=self.number, blocks=column(blocks)))
        return ops + self.reserve(slot, upto)

    def reserve(self, slot: int, upto: int) -> list[SlotUpdate]:
        table = self._tables[slot]
        new = [self.pool.take() for _ in range(self._blocks(upto) - len(table.blocks))]
        if not new:
            return []
        table.blocks += new
        return [AppendBlocks(slot=slot, kind=self.number, blocks=column(new))]

    def short(self, slots: Sequence[int], upto: Sequence[int]) -> list[int]:
        tables = self._tables
        size = self.block_size
        each = zip(slots, upto, strict=True)
        return [max(0, -(-end // size) - len(tables[slot].blocks)) for slot, end in each]

    def grow(self, slots: Sequence[int], short: Sequence[int]) -> list[SlotUpdate]:
        """Extend the table of each slot by ``short`` new blocks. Return the slot updates.

        May evict cached blocks. Raises EngineDead if the pool has too few blocks: callers check
        ``available``.
        """
        tables = self._tables
        ops = list[SlotUpdate]()
        for have in range(max(short, default=0)):  # an update gives each slot at most one block
            named = [slot for slot, lacks in zip(slots, short, strict=True) if lacks > have]
            new = [self.pool.take() for _ in named]
            for slot, block in zip(named, new, strict=True):
                tables[slot].blocks.append(block)
            ops.append(AppendEach(kind=self.number, slots=column(named), blocks=column(new)))
        return ops

    def cut(self, start: int, end: int) -> int:
        return end

    def insert(self, slot: int, committed: int, hashes: Sequence[bytes]) -> None:
        table = self._tables[slot]
        ratio = self._ratio
        upto = min(committed // self.block_size, len(hashes) // ratio)
        if upto <= table.inserted:
            return
        for entry in range(max(table.inserted, table.live), upto):
            self.pool.insert(table.blocks[entry], hashes[(entry + 1) * ratio - 1])
        table.inserted = upto

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        return

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        return

    def release(self, slot: int, after_step: int) -> None:
        table = self._tables.pop(slot)
        # In reverse: the end of a prefix is evicted before the beginning.
        for block in reversed(table.blocks[table.live :]):
            self.pool.release(block, after_step)

    def names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        return self._keys(hashes, 0, len(hashes) // self._ratio)

    def committed(self, step: int) -> None:
        self.pool.committed(step)

    def reset(self) -> None:
        self.pool.reset()
        self._tables.clear()

    def most(self, upto: int) -> int:
        return self._blocks(upto)

    def least(self, upto: int) -> int:
        return self._blocks(upto)

    def fetch_hit(self, hashes: Sequence[bytes], limit: int, position: int) -> int:
        first = self._first_read(position)
        most = min(limit // self.block_size, len(hashes) // self._ratio)
        if most > first:
            most = first + self.pool.leading(self._keys(hashes, first, most))
        return most * self.block_size

    def fetch_needed(self, hashes: Sequence[bytes], start: int, position: int, upto: int) -> int:
        first = self._first_read(position)
        held = self.pool.held(self._keys(hashes, first, start // self.block_size))
        return self._blocks(upto) - first - held

    def fetch(
        self,
        fetch: int,
        hashes: Sequence[bytes],
        start: int,
        position: int,
        upto: int,
        sent_block: int,
    ) -> Blocks:
        first = self._first_read(position)
        hits = start // self.block_size
        shared = [self.pool.find(key) for key in self._keys(hashes, first, hits)]
        for block in shared:  # all hits leave the LRU list before a new block can evict a hit
            self.pool.share(block)
        begin = first + len(shared)
        new = [self.pool.take() for _ in range(self._blocks(upto) - begin)]
        # Blocks before `whole` lack positions not sent by the sender: never insert such blocks.
        whole = -(-max(start, self._first_sent(position, sent_block)) // self.block_size)
        self._tables[fetch] = _Table([NULL_BLOCK] * first + shared + new, first, max(hits, whole))
        return blocks_of(new, begin)

    def adopt(self, fetch: int, slot: int) -> list[SlotUpdate]:
        table = self._tables[slot] = self._tables.pop(fetch)
        return [AppendBlocks(slot=slot, kind=self.number, blocks=column(table.blocks))]

    def table(self, slot: int, position: int) -> Blocks:
        first = self._first_read(position)
        return blocks_of(self._tables[slot].blocks[first : self._blocks(position)], first)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _keys(self, hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """Return the keys of table entries ``first`` .. end - 1. The key of a block is the hash of the last
        base block."""
        return hashes[(first + 1) * self._ratio - 1 : end * self._ratio : self._ratio]

    def _first_read(self, position: int) -> int:
        """Return the first table entry read by a token at ``position``."""
        return 0

    def _first_sent(self, position: int, sent_block: int) -> int:
        """Return the first position sent for a token at ``position`` by a sender with blocks of
        ``sent_block`` positions."""
        return 0

    def _held(self, hashes: Sequence[bytes], num_hit: int) -> int:
        first = self._first_read(num_hit)
        end = num_hit // self.block_size
        return self.pool.held(self._keys(hashes, first, end))


class WindowGroup(FullGroup):
    """A token at position p reads p - window + 1 .. p: earlier blocks are released as p advances.

    So a prefix hit needs only the blocks inside the last window. A sequence of any length fits into a pool of
    the window and one chunk, or even of the window alone, because ``cut`` shortens chunks.
    """

    slides = True

    def __init__(self, number: int, spec: PoolSpec, base_block: int, max_chunk: int) -> None:
        super().__init__(number, spec, base_block)
        if spec.cache.window < 1:
            raise ConfigError("a window cache kind has a window of at least 1")
        self._window = spec.cache.window
        self._max_chunk = max_chunk

    def hit(self, hashes: Sequence[bytes], limit: int) -> int:
        length = min(limit // self.block_size, len(hashes) // self._ratio)
        while length > 0:
            first = self._first_read(length * self.block_size)
            found = self.pool.leading(self._keys(hashes, first, length)[::-1])
            if found == length - first:
                break
            # all hits between the two lengths read the missing block too
            length -= found + 1
        return max(length, 0) * self.block_size

    def needed(self, slot: int, upto: int, num_hit: int = 0, hashes: Sequence[bytes] = ()) -> int:
        if slot in self._tables:  # beyond one chunk, blocks slide out on the way
            return min(super().needed(slot, upto), self._blocks(self._max_chunk))
        whole = min(self._blocks(upto) - self._first_read(num_hit), self._peak())
        return whole - self._held(hashes, num_hit)

    def cut(self, start: int, end: int) -> int:
        return min(end, (self._first_read(start) + self.num_blocks) * self.block_size)

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        table = self._tables[slot]
        # Entries of released blocks become null, so the indices of later entries stay valid.
        first = min(self._first_read(committed), len(table.blocks))
        for entry in range(table.live, first):
            self.pool.release(table.blocks[entry], after_step)
            table.blocks[entry] = NULL_BLOCK
        table.live = max(table.live, first)

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        left = committed - self._window + 1  # the oldest position still read
        for row in np.flatnonzero((left > 0) & (left % self.block_size == 0)).tolist():
            self.slide(int(slots[row]), int(committed[row]), int(after_step[row]))

    def most(self, upto: int) -> int:
        return min(self._blocks(upto), self._peak())

    def least(self, upto: int) -> int:
        return min(self._blocks(upto), self._blocks(self._window - 1) + 1)

    def _first_read(self, position: int) -> int:
        return max(0, position - self._window + 1) // self.block_size

    def _first_sent(self, position: int, sent_block: int) -> int:
        # Rounded down to a block of either side: the sender sends whole blocks, the receiver stores whole
        # blocks.
        read = max(0, position - self._window + 1)
        return max(read // size * size for size in (sent_block, self.block_size))

    def _peak(self) -> int:
        """Return the maximum blocks touched by a window and one chunk after the window, at most the pool
        size."""
        return min(self._blocks(self._window + self._max_chunk - 2) + 1, self.num_blocks)
