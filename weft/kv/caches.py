"""All cache kinds of a model together: the questions and changes that concern every kind at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from weft.common.errors import ConfigError
from weft.config.resolved import KVConfig
from weft.kv.kinds import CacheKind, FullKind, WindowKind, blocks_of
from weft.kv.prefix_log import PrefixLog
from weft.kv.snapshots import Marks, StateKind, marks_for
from weft.types.plan import Op
from weft.types.rooms import Blocks


def make_kinds(kv: KVConfig, max_chunk: int) -> tuple[CacheKind, ...]:
    """The kinds of ``kv.pools``, in order; ``max_chunk`` bounds a sequence's prompt tokens in a step."""
    kinds: list[CacheKind] = []
    for number, spec in enumerate(kv.pools):
        if spec.cache.kind == "state":
            kinds.append(StateKind(number, spec, kv.block_size))
        elif spec.cache.window or spec.cache.kind == "window":
            kinds.append(WindowKind(number, spec, kv.block_size, max_chunk))
        else:
            kinds.append(FullKind(number, spec, kv.block_size))
    return tuple(kinds)


class Caches:
    """Every kind of one model. Ask ``fits`` before changing anything: then every kind can follow.

    Raises ConfigError when some kind could not hold one sequence of ``max_model_len`` tokens.
    """

    def __init__(self, kinds: tuple[CacheKind, ...], max_model_len: int) -> None:
        self.kinds = kinds
        self._states = tuple(kind for kind in kinds if isinstance(kind, StateKind))
        self._tabled = tuple(kind for kind in kinds if not isinstance(kind, StateKind))
        self._sliding = tuple(kind for kind in kinds if kind.slides)
        self._snapshots = bool(self._states) and all(kind.num_blocks for kind in self._states)
        self.unit = math.lcm(*(kind.block_size for kind in kinds))
        """Positions that every hit is a multiple of."""
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
        """The longest prefix, at most ``limit``, that every kind can go on from."""
        return _agreed([partial(kind.hit, hashes) for kind in self.kinds], limit)

    def hit_of_entries(self, hashes: Sequence[bytes], limit: int) -> int:
        """``hit`` if no recurrent state were needed to go on."""
        return _agreed([partial(kind.hit, hashes) for kind in self._tabled], limit)

    def needed(self, slot: int, upto: int, num_hit: int = 0, hashes: Sequence[bytes] = ()) -> list[int]:
        """Blocks of each kind, as ``CacheKind.needed``."""
        return [kind.needed(slot, upto, num_hit, hashes) for kind in self.kinds]

    def fits(self, needed: Sequence[int], spare: float = 0.0) -> bool:
        """Whether every kind has as many blocks available, and a share ``spare`` of its pool beside them."""
        if spare and any(n + spare * k.num_blocks > k.available() for n, k in self._of_tables(needed)):
            return False
        return all(n <= kind.available() for n, kind in zip(needed, self.kinds, strict=True))

    def ever_fits(self, needed: Sequence[int]) -> bool:
        """Whether every kind has as many blocks."""
        return all(n <= kind.num_blocks for n, kind in zip(needed, self.kinds, strict=True))

    def will_fit(self, needed: Sequence[int]) -> bool:
        """Whether every kind will, once the steps in flight have committed."""
        return all(n <= kind.available() + kind.pending() for n, kind in zip(needed, self.kinds, strict=True))

    def acquire(self, slot: int, hashes: Sequence[bytes], num_hit: int, upto: int) -> list[Op]:
        """``CacheKind.acquire`` of each kind."""
        return [op for kind in self.kinds for op in kind.acquire(slot, hashes, num_hit, upto)]

    def reserve(self, slot: int, upto: int) -> list[Op]:
        """``CacheKind.reserve`` of each kind."""
        return [op for kind in self.kinds for op in kind.reserve(slot, upto)]

    def reserved(self, upto: int) -> int:
        """How far the tables of a slot reach when ``upto`` is the furthest that was reserved."""
        return min((-(-upto // kind.block_size) * kind.block_size for kind in self._tabled), default=1 << 62)

    def grow(self, slots: np.ndarray, upto: np.ndarray) -> tuple[list[Op], np.ndarray] | None:
        """``reserve`` of many slots at once: (ops, how far each slot's tables reach now).

        None, and nothing is changed, when some kind has too few blocks for all of them.
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
        """Where a chunk from ``start`` must end for every kind, at most ``end``."""
        while True:
            cut = min((kind.cut(start, end) for kind in self.kinds), default=end)
            if cut == end:
                return end
            end = cut

    def publish(self, slot: int, committed: int, hashes: Sequence[bytes]) -> None:
        """``CacheKind.publish`` of each kind."""
        for kind in self.kinds:
            kind.publish(slot, committed, hashes)

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        """``CacheKind.slide`` of each kind."""
        for kind in self._sliding:
            kind.slide(slot, committed, after_step)

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        """``CacheKind.slide_each`` of each kind."""
        for kind in self._sliding:
            kind.slide_each(slots, committed, after_step)

    def release(self, slot: int, after_step: int) -> None:
        """``CacheKind.release`` of each kind."""
        for kind in self.kinds:
            kind.release(slot, after_step)

    def committed(self, step: int) -> None:
        """``step`` and all before it have committed."""
        for kind in self.kinds:
            kind.committed(step)

    def reset(self) -> None:
        """``CacheKind.reset`` of each kind."""
        for kind in self.kinds:
            kind.reset()

    def follow(self) -> tuple[PrefixLog, int] | None:
        """A log of the prefixes that are cached, and at each multiple of how many positions it has a key.

        Of the finest kind that keeps whole prefixes: others may have lost more of one, or have no snapshot
        where it ends. None where no kind keeps them.
        """
        keeps = [kind for kind in self._tabled if not kind.slides]
        if not keeps:
            return None
        finest = min(keeps, key=lambda kind: kind.block_size)
        return finest.pool.follow(), finest.block_size

    def keep(self, hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
        """What is cached of this prefix is evicted after all that nobody keeps; of recurrent states the last
        snapshot. Returns what ``unkeep`` needs."""
        names = [kind.names(hashes) for kind in self.kinds]
        for kind, each in zip(self.kinds, names, strict=True):
            for key in each:
                kind.pool.keep(key)
        return names

    def unkeep(self, names: Sequence[Sequence[bytes]]) -> None:
        """The other side of one ``keep``, which returned ``names``."""
        for kind, each in zip(self.kinds, names, strict=True):
            for key in each:
                kind.pool.unkeep(key)

    def prefix_positions(self) -> int:
        """Positions that the smallest pool of whole prefixes holds."""
        keeps = [kind for kind in self._tabled if not kind.slides]
        return min((kind.num_blocks * kind.block_size for kind in keeps), default=0)

    def num_on_hold(self) -> int:
        """Blocks of all kinds that are on hold."""
        return sum(kind.pool.num_on_hold() for kind in self.kinds)

    def guaranteed(self, lengths: Sequence[int]) -> bool:
        """Whether sequences that grow to ``lengths`` tokens can all run to their ends side by side.

        One alone always can.
        """
        if len(lengths) == 1:
            return True
        return all(sum(kind.most(n) for n in lengths) <= kind.num_blocks for kind in self.kinds)

    def free_blocks(self) -> tuple[int, ...]:
        """Available blocks of each kind."""
        return tuple(kind.available() for kind in self.kinds)

    def usage(self) -> float:
        """Used share of the fullest pool, 0 .. 1."""
        return max((1 - kind.available() / kind.num_blocks for kind in self._tabled), default=0.0)

    # ---- what comes from other groups, and goes there

    def fetch_hit(self, hashes: Sequence[bytes], position: int) -> int:
        """The longest prefix that has not to be sent to a sequence that goes on at ``position``.

        A recurrent state is sent in any case, and then one position at least: that is what it comes with.
        """
        limit = position - 1 if self._states else position
        return _agreed([partial(self._fetch_hit, kind, hashes, position) for kind in self._tabled], limit)

    def _of_tables(self, needed: Sequence[int]) -> list[tuple[int, CacheKind]]:
        """Of those kinds that have tables, with the kind."""
        pairs = zip(needed, self.kinds, strict=True)
        return [(n, kind) for n, kind in pairs if not isinstance(kind, StateKind)]

    @staticmethod
    def _fetch_hit(kind: CacheKind, hashes: Sequence[bytes], position: int, limit: int) -> int:
        return kind.fetch_hit(hashes, limit, position)

    def fetch_needed(self, hashes: Sequence[bytes], start: int, position: int, upto: int) -> list[int]:
        """``CacheKind.fetch_needed`` of each kind."""
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
        """``CacheKind.fetch`` of each kind; ``sent_blocks``: positions of a block there, of each."""
        return tuple(
            kind.fetch(fetch, hashes, start, position, upto, size)
            for kind, size in zip(self.kinds, sent_blocks, strict=True)
        )

    def adopt(self, fetch: int, slot: int) -> list[Op]:
        """``CacheKind.adopt`` of each kind."""
        return [op for kind in self.kinds for op in kind.adopt(fetch, slot)]

    def table(self, slot: int, position: int) -> tuple[Blocks, ...]:
        """``CacheKind.table`` of each kind."""
        return tuple(kind.table(slot, position) for kind in self.kinds)

    @property
    def recurrent(self) -> bool:
        """Whether there are kinds that have a state, and no entries."""
        return bool(self._states)

    def can_take(self) -> bool:
        """Whether each recurrent kind has a block for a state."""
        return all(kind.available() for kind in self._states)

    def take(self, slot: int, after_step: int) -> tuple[list[Op], tuple[Blocks, ...]]:
        """``StateKind.take`` of each, and for each kind its block; no ids where there are none."""
        ops = list[Op]()
        blocks = [Blocks(first=0, ids=b"")] * len(self.kinds)
        for kind in self._states:
            op, block = kind.take(slot, after_step)
            ops.append(op)
            blocks[kind.number] = blocks_of([block], 0)
        return ops, tuple(blocks)

    # ---- snapshots of recurrent states

    @property
    def has_states(self) -> bool:
        """Whether there are snapshots to make."""
        return self._snapshots

    def marks(self, hashes: Sequence[bytes], known: int, num_hit: int) -> Marks | None:
        """At which boundaries a sequence of ``known`` ids leaves snapshots; None: at none.

        It starts from a hit of ``num_hit``; ``hashes`` are of what it may share.
        """
        if not self._snapshots or not hashes:
            return None
        branch = _agreed([partial(kind.hit, hashes) for kind in self._tabled], known - 1)
        return marks_for(self.unit, self._states[0].stride, known, num_hit, branch)

    def save(self, slot: int, key: bytes, back: int, keep: bool, step: int) -> list[Op] | None:
        """``StateKind.save`` of each; None when some kind has no block for it."""
        missing = [kind for kind in self._states if not kind.has(key)]
        if not all(kind.available() for kind in missing):
            return None
        saved = [kind.save(slot, key, back, keep, step) for kind in self._states]
        return [op for op in saved if op is not None]

    def spoil(self, slot: int) -> None:
        """``StateKind.spoil`` of each."""
        for kind in self._states:
            kind.spoil(slot)


def _agreed(hits: Sequence[Callable[[int], int]], limit: int) -> int:
    """The longest prefix, at most ``limit``, that each kind can go on from, given the ``hit`` of each.

    Each answer is at most the limit it was given, so limits fall until all agree.
    """
    while True:
        result = min((hit(limit) for hit in hits), default=0)
        if result == limit:
            return result
        limit = result
