"""Cache kinds: how the layers of one kind use their pool, behind one interface.

What an entry holds (keys and values, a latent, a group of positions compressed into one) is of no concern
here. Kinds differ in what they keep: every entry (``FullKind``), the last ones (``WindowKind``), or no
entries at all but now and then a snapshot (``weft.kv.snapshots``).

    positions   0 .......... hit ........ committed ...... scheduled ....... reserved
    blocks      shared, read only | own, full, published | own, being written | own, empty

``hit`` and everything published is committed and immutable. Publishing and sliding go by committed lengths,
reservation by upper bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from weft.common.errors import ConfigError
from weft.config.resolved import PoolSpec
from weft.kv.pool import NULL_BLOCK, BlockPool
from weft.types.plan import AppendBlocks, AppendEach, Op, column
from weft.types.rooms import Blocks


class CacheKind(Protocol):
    """What the scheduler asks of a kind. Lengths are in tokens, counted from the start of the sequence.

    A slot has a block table from ``acquire`` to ``release``. ``hashes`` are those of the sequence's leading
    full base blocks. ``needed`` must have been at most ``available`` before ``acquire`` and ``reserve``.

    A sequence whose cache comes from another group (``weft.types.rooms``) has a table, too, from ``fetch`` to
    ``adopt`` or ``release``, under a number that is no slot's: a negative one.
    """

    block_size: int
    num_blocks: int
    slides: bool
    """Whether ``slide`` may ever give anything up."""
    pool: BlockPool
    """To be asked and changed by the kind alone, but for holds."""

    def available(self) -> int:
        """Blocks that can be taken now."""

    def pending(self) -> int:
        """Blocks that become available when the steps in flight have committed."""

    def hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """The longest prefix, at most ``limit``, after which a sequence can go on from the cache."""

    def needed(self, slot: int, upto: int, num_hit: int = 0, hashes: Sequence[bytes] = ()) -> int:
        """Blocks that must be available to get the slot's table to ``upto``, at most at once.

        For a slot without a table ``num_hit`` tokens come from the cache, and cached blocks that nobody
        holds count, since they stop being available.
        """

    def acquire(self, slot: int, hashes: Sequence[bytes], num_hit: int, upto: int) -> list[Op]:
        """Makes the slot's table: the blocks of a hit, and new ones up to ``upto``."""

    def reserve(self, slot: int, upto: int) -> list[Op]:
        """Extends the slot's table to ``upto``."""

    def short(self, slots: Sequence[int], upto: Sequence[int]) -> list[int]:
        """How many blocks the table of each slot lacks to reach its ``upto``."""

    def grow(self, slots: Sequence[int], short: Sequence[int]) -> list[Op]:
        """``reserve`` of many slots at once: as many blocks for each as it is ``short`` of."""

    def cut(self, start: int, end: int) -> int:
        """Where a chunk from ``start`` must end: ``end``, or earlier (but after ``start``)."""

    def publish(self, slot: int, committed: int, hashes: Sequence[bytes]) -> None:
        """Lets others find the full blocks below ``committed`` that ``hashes`` names. Idempotent."""

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        """Gives up blocks that no position from ``committed`` on will read, after ``after_step``."""

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        """``slide`` of many slots, each of which has committed one position since it last slid."""

    def release(self, slot: int, after_step: int) -> None:
        """Drops the table; its blocks are available again when ``after_step`` has committed."""

    def names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Keys of the blocks that going on from this prefix may need, whether or not they are cached."""

    def committed(self, step: int) -> None:
        """``step`` and all before it have committed."""

    def reset(self) -> None:
        """No slot has a table, and nothing is cached; blocks on hold stay out of use."""

    def most(self, upto: int) -> int:
        """The most blocks that a sequence of ``upto`` tokens needs at once to go on without waiting."""

    def least(self, upto: int) -> int:
        """The fewest blocks of a pool with which one sequence alone gets to ``upto`` tokens."""

    def fetch_hit(self, hashes: Sequence[bytes], limit: int, position: int) -> int:
        """The longest prefix, at most ``limit``, of which a token at ``position`` finds here all it reads."""

    def fetch_needed(self, hashes: Sequence[bytes], start: int, position: int, upto: int) -> int:
        """Blocks that must be available before ``fetch``."""

    def fetch(
        self,
        fetch: int,
        hashes: Sequence[bytes],
        start: int,
        position: int,
        upto: int,
        sent_block: int,
    ) -> Blocks:
        """Makes the table ``fetch`` for a token at ``position``, up to ``upto``: what it reads before
        ``start``, from the cache, and new blocks.

        Positions ``start`` .. position - 1 come from a group whose blocks have ``sent_block`` positions, as
        ``weft.transfer.spans.first_position`` says. Returns where to put them: the new blocks.
        """

    def adopt(self, fetch: int, slot: int) -> list[Op]:
        """The table ``fetch`` becomes that of ``slot``."""

    def table(self, slot: int, position: int) -> Blocks:
        """What a token at ``position`` reads: entries of the table of ``slot``, as far as they are there."""


def blocks_of(table: Sequence[int], first: int) -> Blocks:
    """Entries of a block table, of which the first has number ``first``."""
    return Blocks(first=first, ids=np.asarray(table, "<i4").tobytes())


def ids_of(blocks: Blocks) -> list[int]:
    """The other way round."""
    ids: list[int] = np.frombuffer(blocks.ids, "<i4").tolist()
    return ids


class _Table:
    __slots__ = ("blocks", "live", "published")

    def __init__(self, blocks: list[int], live: int, published: int) -> None:
        self.blocks = blocks
        self.live = live  # entries before it are null: slid out, or never there
        self.published = published  # entries before it were published or shared, or never will be


class FullKind:
    """Every position reads all before it: blocks are held from admission to release.

    A block counts source positions, also where one entry stands for ``ratio`` of them. It is a whole number
    of base blocks and of such groups, so a hit, which takes full blocks only, never ends inside a group.
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
        return self._blocks(upto) - self._first_read(num_hit) - self._held(hashes, num_hit)

    def acquire(self, slot: int, hashes: Sequence[bytes], num_hit: int, upto: int) -> list[Op]:
        first = self._first_read(num_hit)
        hits = num_hit // self.block_size
        blocks = [NULL_BLOCK] * first + [self.pool.find(key) for key in self._keys(hashes, first, hits)]
        for block in blocks[first:]:  # all hits leave the LRU before anything can be evicted from it
            self.pool.share(block)
        self._tables[slot] = _Table(blocks, first, hits)
        ops: list[Op] = []
        if blocks:
            ops.append(AppendBlocks(slot=slot, kind=self.number, blocks=column(blocks)))
        return ops + self.reserve(slot, upto)

    def reserve(self, slot: int, upto: int) -> list[Op]:
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

    def grow(self, slots: Sequence[int], short: Sequence[int]) -> list[Op]:
        tables = self._tables
        ops = list[Op]()
        for have in range(max(short, default=0)):  # an op gives a slot one block
            named = [slot for slot, lacks in zip(slots, short, strict=True) if lacks > have]
            new = [self.pool.take() for _ in named]
            for slot, block in zip(named, new, strict=True):
                tables[slot].blocks.append(block)
            ops.append(AppendEach(kind=self.number, slots=column(named), blocks=column(new)))
        return ops

    def cut(self, start: int, end: int) -> int:
        return end

    def publish(self, slot: int, committed: int, hashes: Sequence[bytes]) -> None:
        table = self._tables[slot]
        ratio = self._ratio
        upto = min(committed // self.block_size, len(hashes) // ratio)
        if upto <= table.published:
            return
        for entry in range(max(table.published, table.live), upto):
            self.pool.publish(table.blocks[entry], hashes[(entry + 1) * ratio - 1])
        table.published = upto

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        return

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        return

    def release(self, slot: int, after_step: int) -> None:
        table = self._tables.pop(slot)
        for block in reversed(table.blocks[table.live :]):  # the ends of prefixes are evicted first
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
        for block in shared:  # all hits leave the LRU before anything can be evicted from it
            self.pool.share(block)
        begin = first + len(shared)
        new = [self.pool.take() for _ in range(self._blocks(upto) - begin)]
        whole = -(-max(start, self._first_sent(position, sent_block)) // self.block_size)
        self._tables[fetch] = _Table([NULL_BLOCK] * first + shared + new, first, max(hits, whole))
        return blocks_of(new, begin)

    def adopt(self, fetch: int, slot: int) -> list[Op]:
        table = self._tables[slot] = self._tables.pop(fetch)
        return [AppendBlocks(slot=slot, kind=self.number, blocks=column(table.blocks))]

    def table(self, slot: int, position: int) -> Blocks:
        first = self._first_read(position)
        return blocks_of(self._tables[slot].blocks[first : self._blocks(position)], first)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _keys(self, hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """Names of the table entries ``first .. end - 1``: a block's is the hash of its last base block."""
        return hashes[(first + 1) * self._ratio - 1 : end * self._ratio : self._ratio]

    def _first_read(self, position: int) -> int:
        """The first table entry that a token at ``position`` reads."""
        return 0

    def _first_sent(self, position: int, sent_block: int) -> int:
        """From where on what a token at ``position`` reads is sent, by a group with blocks of that size."""
        return 0

    def _held(self, hashes: Sequence[bytes], num_hit: int) -> int:
        first = self._first_read(num_hit)
        end = num_hit // self.block_size
        return self.pool.held(self._keys(hashes, first, end))


class WindowKind(FullKind):
    """A token at position p reads p - window + 1 .. p: blocks before that are given up as p moves on.

    So a prefix hit needs only the blocks inside the window at its end, and a sequence of any length passes
    through a pool that holds the window and one chunk (or even the window alone: ``cut`` makes chunks fit).
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
            length -= found + 1  # every hit that is longer than this, and shorter than the last, reads it too
        return max(length, 0) * self.block_size

    def needed(self, slot: int, upto: int, num_hit: int = 0, hashes: Sequence[bytes] = ()) -> int:
        if slot in self._tables:  # further than one chunk away, blocks will slide out on the way
            return min(super().needed(slot, upto), self._blocks(self._max_chunk))
        whole = min(self._blocks(upto) - self._first_read(num_hit), self._peak())
        return whole - self._held(hashes, num_hit)

    def cut(self, start: int, end: int) -> int:
        return min(end, (self._first_read(start) + self.num_blocks) * self.block_size)

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        table = self._tables[slot]
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
        read = max(0, position - self._window + 1)
        return max(read // size * size for size in (sent_block, self.block_size))

    def _peak(self) -> int:
        """Most blocks that a window and one chunk after it touch, if the pool has as many."""
        return min(self._blocks(self._window + self._max_chunk - 2) + 1, self.num_blocks)
