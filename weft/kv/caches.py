"""All KV cache groups of a model together: queries and changes that concern every group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from weft.common.errors import ConfigError
from weft.config.resolved import KVConfig
from weft.kv.block_events import Content
from weft.kv.cache_groups import CacheGroup, FullGroup, WindowGroup, blocks_of
from weft.kv.chunk_group import ChunkGroup
from weft.kv.prefix_log import PrefixLog
from weft.kv.snapshots import SnapshotMarks, StateGroup, marks_for
from weft.types.plan import SlotUpdate
from weft.types.transfer import Blocks


def make_cache_groups(kv: KVConfig, max_chunk: int) -> tuple[CacheGroup, ...]:
    """Return the KV cache groups of ``kv.pools`` in order. ``max_chunk``: maximum prompt tokens of a row per
    step."""
    kinds: list[CacheGroup] = []
    for number, spec in enumerate(kv.pools):
        if spec.cache.kind == "state":
            kinds.append(StateGroup(number, spec, kv.block_size))
        elif spec.cache.kind == "chunk":
            kinds.append(ChunkGroup(number, spec, kv.block_size, max_chunk))
        elif spec.cache.window or spec.cache.kind == "window":
            kinds.append(WindowGroup(number, spec, kv.block_size, max_chunk))
        else:
            kinds.append(FullGroup(number, spec, kv.block_size))
    return tuple(kinds)


class Caches:
    """Every KV cache group of one model. Check ``fits`` before a change: then the change succeeds in every
    group.

    Raises ConfigError if a group could not hold one sequence of ``max_model_len`` tokens.
    """

    def __init__(self, kinds: tuple[CacheGroup, ...], max_model_len: int) -> None:
        self.kinds = kinds
        self._states = tuple(kind for kind in kinds if isinstance(kind, StateGroup))
        self._tabled = tuple(kind for kind in kinds if not isinstance(kind, StateGroup))
        self._sliding = tuple(kind for kind in kinds if kind.slides)
        self.slides = bool(self._sliding)
        """True if a group releases blocks behind a window or chunk."""
        self._log: PrefixLog | None = None
        self._snapshots = bool(self._states) and all(kind.num_blocks for kind in self._states)
        self.unit = math.lcm(*(kind.block_size for kind in kinds))
        """Granularity of hits, in positions: the least common multiple of the block sizes."""
        # Refuse at start-up: a sequence that can never fit would wait forever.
        for kind in kinds:
            least = kind.least(max_model_len)
            if kind.num_blocks < least:
                raise ConfigError(
                    f"the cache holds {kind.num_blocks} blocks of {kind.block_size} tokens of one kind, and "
                    f"one sequence of {max_model_len} tokens takes {least}: raise --kv-cache-memory or lower "
                    "--max-model-len",
                    param="--kv-cache-memory",
                )

    def hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """Return the longest prefix, at most ``limit``, from which every group can continue. In tokens."""
        return agreed([partial(kind.hit, hashes) for kind in self.kinds], limit)

    def hit_of_entries(self, hashes: Sequence[bytes], limit: int) -> int:
        """Return the possible ``hit`` without recurrent states."""
        return agreed([partial(kind.hit, hashes) for kind in self._tabled], limit)

    def needed(self, slot: int, upto: int, num_hit: int = 0, hashes: Sequence[bytes] = ()) -> list[int]:
        """Return the needed blocks of each group, see ``CacheGroup.needed``."""
        return [kind.needed(slot, upto, num_hit, hashes) for kind in self.kinds]

    def fits(self, needed: Sequence[int], spare: float = 0.0) -> bool:
        """Return True if every group has ``needed`` free blocks, plus a share ``spare`` of each pool with
        tables."""
        # The spare share applies only to pools with block tables.
        if spare and any(n + spare * k.num_blocks > k.available() for n, k in self._of_tables(needed)):
            return False
        return all(n <= kind.available() for n, kind in zip(needed, self.kinds, strict=True))

    def ever_fits(self, needed: Sequence[int]) -> bool:
        """Return True if every pool is large enough for ``needed`` blocks."""
        return all(n <= kind.num_blocks for n, kind in zip(needed, self.kinds, strict=True))

    def will_fit(self, needed: Sequence[int]) -> bool:
        """Return True if every group has ``needed`` free blocks once the steps in flight have committed."""
        return all(n <= kind.available() + kind.pending() for n, kind in zip(needed, self.kinds, strict=True))

    def acquire(self, slot: int, hashes: Sequence[bytes], num_hit: int, upto: int) -> list[SlotUpdate]:
        """Create the tables of a slot in every group: the blocks of the hit, and new blocks up to ``upto``.
        Return all slot updates."""
        return [op for kind in self.kinds for op in kind.acquire(slot, hashes, num_hit, upto)]

    def reserve(self, slot: int, upto: int) -> list[SlotUpdate]:
        """Extend the tables of a slot to ``upto`` in every group. Return all slot updates."""
        return [op for kind in self.kinds for op in kind.reserve(slot, upto)]

    def reserved(self, upto: int) -> int:
        """Return how far the tables of a slot reach after a reservation up to ``upto``. In tokens.

        Without block tables, the reach is unlimited.
        """
        return min((-(-upto // kind.block_size) * kind.block_size for kind in self._tabled), default=1 << 62)

    def grow(self, slots: np.ndarray, upto: np.ndarray) -> tuple[list[SlotUpdate], np.ndarray] | None:
        """Reserve for many slots at once: [slots] up to positions [slots].

        Return (slot updates, new reach of each slot). Return None, without any change, if blocks are missing.
        """
        each = slots.tolist()
        ends = upto.tolist()
        short = [kind.short(each, ends) for kind in self.kinds]
        if not self.fits([sum(lacks) for lacks in short]):
            return None
        ops = [op for kind, lacks in zip(self.kinds, short, strict=True) for op in kind.grow(each, lacks)]
        reach = np.full(len(upto), 1 << 62, np.int64)
        for kind in self._tabled:
            np.minimum(reach, -(-upto // kind.block_size) * kind.block_size, out=reach)
        return ops, reach

    def cut(self, start: int, end: int) -> int:
        """Return where a chunk from ``start`` must end for every group, at most ``end``."""
        # A cut by one group may force an earlier cut by another group: repeat until all groups agree.
        while True:
            cut = min((kind.cut(start, end) for kind in self.kinds), default=end)
            if cut == end:
                return end
            end = cut

    def insert(
        self, slot: int, committed: int, hashes: Sequence[bytes], content: Content | None = None
    ) -> None:
        """Insert full blocks of every group into the prefix cache, see ``CacheGroup.insert``.

        ``content``: the sequence of the blocks, needed if the log of ``follow`` records events.
        """
        for kind in self.kinds:
            kind.insert(slot, committed, hashes)
        if self._log is not None and self._log.events is not None and content is not None:
            self._log.events.describe(content, hashes)

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        """Release blocks of sliding groups not read from ``committed`` on, after ``after_step`` has
        committed."""
        for kind in self._sliding:
            kind.slide(slot, committed, after_step)

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        """Call ``slide_each`` of every sliding group."""
        for kind in self._sliding:
            kind.slide_each(slots, committed, after_step)

    def release(self, slot: int, after_step: int) -> None:
        """Drop the tables of a slot in every group. The blocks are free when ``after_step`` has committed."""
        for kind in self.kinds:
            kind.release(slot, after_step)

    def committed(self, step: int) -> None:
        """Note the commit of ``step`` and all earlier steps."""
        for kind in self.kinds:
            kind.committed(step)

    def forget_prefixes(self) -> int:
        """Forget all cached contents, and return the number of blocks. Tables of slots stay as they are."""
        return sum(kind.pool.forget_all() for kind in self.kinds)

    def reset(self) -> None:
        """Drop all tables and cached contents. Pinned blocks stay out of use."""
        for kind in self.kinds:
            kind.reset()

    def follow(self) -> tuple[PrefixLog, int] | None:
        """Return (log of cached prefixes, positions per key); None if no group stores whole prefixes.

        Among the groups with whole prefixes, the log follows the group with the smallest blocks. Other groups
        may have evicted more of a prefix, or lack a snapshot at the end of a prefix.
        """
        complete = [kind for kind in self._tabled if not kind.slides]
        if not complete:
            return None
        finest = min(complete, key=lambda kind: kind.block_size)
        self._log = finest.pool.follow()
        return self._log, finest.block_size

    def retain(self, hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
        """Retain the cached blocks of a prefix: they are evicted after all other blocks. Return the argument
        for ``end_retention``.

        Of recurrent states, only the last snapshot is retained.
        """
        names = [kind.names(hashes) for kind in self.kinds]
        for kind, each in zip(self.kinds, names, strict=True):
            for key in each:
                kind.pool.retain(key)
        return names

    def end_retention(self, names: Sequence[Sequence[bytes]]) -> None:
        """Undo one ``retain``, which returned ``names``."""
        for kind, each in zip(self.kinds, names, strict=True):
            for key in each:
                kind.pool.end_retention(key)

    def prefix_positions(self) -> int:
        """Return the number of positions in the smallest pool of whole prefixes; 0 without such a pool."""
        complete = [kind for kind in self._tabled if not kind.slides]
        return min((kind.num_blocks * kind.block_size for kind in complete), default=0)

    def num_pinned(self) -> int:
        """Return the number of pinned blocks of all groups."""
        return sum(kind.pool.num_pinned() for kind in self.kinds)

    def guaranteed(self, lengths: Sequence[int]) -> bool:
        """Return True if sequences of ``lengths`` tokens can all run to the end side by side.

        True for one sequence: ``__init__`` has checked the size of every pool.
        """
        if len(lengths) == 1:
            return True
        return all(sum(kind.most(n) for n in lengths) <= kind.num_blocks for kind in self.kinds)

    def free_blocks(self) -> tuple[int, ...]:
        """Return the free blocks of each group."""
        return tuple(kind.available() for kind in self.kinds)

    def usage(self) -> float:
        """Return the used share of the fullest pool with block tables, 0 .. 1."""
        return max((1 - kind.available() / kind.num_blocks for kind in self._tabled), default=0.0)

    # ---- transfers from and to other groups

    def fetch_hit(self, hashes: Sequence[bytes], position: int) -> int:
        """Return the longest prefix not to be sent to a sequence with the next position ``position``.

        A recurrent state is always sent. At least one position is then sent too, because the state comes with
        a position.
        """
        limit = position - 1 if self._states else position
        return agreed([partial(self._fetch_hit, kind, hashes, position) for kind in self._tabled], limit)

    def _of_tables(self, needed: Sequence[int]) -> list[tuple[int, CacheGroup]]:
        """Return the (needed, group) pairs of the groups with block tables."""
        pairs = zip(needed, self.kinds, strict=True)
        return [(n, kind) for n, kind in pairs if not isinstance(kind, StateGroup)]

    @staticmethod
    def _fetch_hit(kind: CacheGroup, hashes: Sequence[bytes], position: int, limit: int) -> int:
        return kind.fetch_hit(hashes, limit, position)

    def fetch_needed(self, hashes: Sequence[bytes], start: int, position: int, upto: int) -> list[int]:
        """Return the number of free blocks needed by ``fetch``, for each group."""
        return [kind.fetch_needed(hashes, start, position, upto) for kind in self.kinds]

    def fetch(
        self,
        fetch: int,
        hashes: Sequence[bytes],
        start: int,
        position: int,
        upto: int,
        sent_blocks: Sequence[int],
    ) -> tuple[Blocks, ...]:
        """Create the table ``fetch`` in every group for KV from another group. Return the new blocks of each
        group, see ``CacheGroup.fetch``.

        ``sent_blocks``: block size of the sender, for each group.
        """
        return tuple(
            kind.fetch(fetch, hashes, start, position, upto, size)
            for kind, size in zip(self.kinds, sent_blocks, strict=True)
        )

    def adopt(self, fetch: int, slot: int) -> list[SlotUpdate]:
        """Make the block tables ``fetch`` the tables of ``slot``, in every group. Return the slot updates."""
        return [op for kind in self.kinds for op in kind.adopt(fetch, slot)]

    def table(self, slot: int, position: int) -> tuple[Blocks, ...]:
        """Return the table entries of ``slot`` read by a token at ``position``, for each group. Recurrent
        groups have none."""
        return tuple(kind.table(slot, position) for kind in self.kinds)

    @property
    def recurrent(self) -> bool:
        """True if the model has recurrent states."""
        return bool(self._states)

    def can_take(self) -> bool:
        """Return True if every recurrent group has a free block for a state."""
        return all(kind.available() for kind in self._states)

    def take(self, slot: int, after_step: int) -> tuple[list[SlotUpdate], tuple[Blocks, ...]]:
        """Save the recurrent states of ``slot`` to private blocks. Return (slot updates, blocks of every
        group).

        The slot updates must go into the next plan. The blocks are free when ``after_step`` has committed,
        unless pinned. Check ``can_take`` first: raises EngineDead without a free block. Groups with block
        tables get an empty ``Blocks``.
        """
        ops = list[SlotUpdate]()
        blocks = [Blocks(first=0, ids=b"")] * len(self.kinds)
        for kind in self._states:
            op, block = kind.take(slot, after_step)
            ops.append(op)
            blocks[kind.number] = blocks_of([block], 0)
        return ops, tuple(blocks)

    # ---- snapshots of recurrent states

    @property
    def has_states(self) -> bool:
        """True if snapshots can be made: there are recurrent groups, and each has blocks."""
        return self._snapshots

    def marks(self, hashes: Sequence[bytes], known: int, num_hit: int) -> SnapshotMarks | None:
        """Return the boundaries at which a sequence of ``known`` ids saves snapshots; None for no snapshots.

        ``num_hit``: cached tokens at the start. ``hashes``: of the shareable blocks.
        """
        if not self._snapshots or not hashes:
            return None
        # branch: how far the entries of others match, with or without a snapshot there.
        branch = agreed([partial(kind.hit, hashes) for kind in self._tabled], known - 1)
        return marks_for(self.unit, self._states[0].stride, known, num_hit, branch)

    def save(self, slot: int, key: bytes, back: int, keep: bool, step: int) -> list[SlotUpdate] | None:
        """Save a snapshot of each recurrent group in plan ``step``, see ``StateGroup.save``. Return the slot
        updates; [] if all snapshots exist. Return None, without any change, if a group has no free block."""
        missing = [kind for kind in self._states if not kind.has(key)]
        if not all(kind.available() for kind in missing):
            return None
        saved = [kind.save(slot, key, back, keep, step) for kind in self._states]
        return [op for op in saved if op is not None]

    def spoil(self, slot: int) -> None:
        """Invalidate the unfinished snapshots of the slot, because a step failed."""
        for kind in self._states:
            kind.spoil(slot)


def agreed(hits: Sequence[Callable[[int], int]], limit: int) -> int:
    """Return the longest prefix, at most ``limit``, on which all ``hits`` agree.

    Each hit function returns at most the given limit. So the limit falls until all functions return the
    limit.
    """
    while True:
        result = min((hit(limit) for hit in hits), default=0)
        if result == limit:
            return result
        limit = result
