"""Embeddings of images as a cache: which are held, in which blocks, and which go when room is needed.

Pure: nothing is moved here. What ranks have to do for it is said in ops, which go out with the next plan, in
the order of decisions. Blocks are those of a rank's pool, ids 1 .. n; 0 is the null block.

    add ──────────────> in device blocks ──drop──> gone
                          │          ^
              evicted, in the order of last use
                          v          │ raised, when it is wanted
                      in host blocks ──evicted, or dropped──> gone

An embedding is in one tier. One that is pinned is neither moved nor evicted, and its blocks stay out of use
until the last pin is gone, also when the embedding itself is (``drop``, ``clear``).

Blocks that an embedding leaves may be written by later plans at once, as ranks carry plans out in order. A
writer outside the plans, a transfer, gets those alone which no plan in flight touches: *settled* ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from weft.common.errors import EngineDead
from weft.types.media import BLOCK_ROWS
from weft.types.plan import MoveMedia, Op

__all__ = ["BLOCK_ROWS", "Embedded", "EmbeddingCache", "ids"]


def ids(blocks: Iterable[int]) -> bytes:
    """``blocks`` as ops have them."""
    return np.fromiter(blocks, np.int32).tobytes()


class Embedded:
    """An embedding in the cache. Changed by ``EmbeddingCache`` alone."""

    __slots__ = ("blocks", "count", "gone", "key", "on_host", "pins", "ready", "step", "whole")

    def __init__(self, key: bytes, count: int, blocks: list[int]) -> None:
        self.key, self.count, self.blocks = key, count, blocks
        """Of the tier that it is in."""
        self.on_host = False
        self.pins = 0
        self.gone = False
        """Whether nobody finds it any more: it is there for its pins alone."""
        self.ready = True
        """False while it is still to come: its blocks are taken, and nothing can be read of them."""
        self.whole = True
        """False while each rank has its share of the rows alone."""
        self.step = -1
        """The last plan that writes or reads its device blocks."""

    @property
    def ids(self) -> bytes:
        """Its blocks, as ops have them."""
        return ids(self.blocks)


class EmbeddingCache:
    """The embeddings of one group: every rank has the same blocks."""

    def __init__(
        self,
        blocks: int,
        host_blocks: int = 0,
        *,
        row_bytes: int = 1,
        block_rows: int = BLOCK_ROWS,
        dropped: Callable[[Embedded], None] | None = None,
        wanted: Callable[[bytes], bool] | None = None,
    ) -> None:
        """``dropped`` is told of each that is gone, in any way but ``clear``. ``wanted``: whether somebody
        needs the image of a key, which then leaves the host's blocks for none that nobody needs. Raises
        ValueError for sizes that cannot be."""
        if min(blocks, host_blocks) < 0 or min(row_bytes, block_rows) < 1:
            raise ValueError("a pool of embeddings has at least 0 blocks, of at least 1 row and byte")
        self.blocks, self.host_blocks, self.block_rows = blocks, host_blocks, block_rows
        self._row_bytes = row_bytes
        self._dropped = dropped
        self._wanted = wanted
        self._held: OrderedDict[bytes, Embedded] = OrderedDict()
        """By key, the least recently used first; of both tiers."""
        self._free = list(range(blocks, 0, -1))
        """Settled ones; the last is taken first."""
        self._leaving: OrderedDict[int, int] = OrderedDict()
        """Free ones that plans in flight touch: block -> the last of them."""
        self._host_free = list(range(host_blocks, 0, -1))
        self._ops: list[Op] = []
        self._last_commit = -1
        self.next_step = 0
        """Number of the next plan."""
        self.nbytes = 0
        """Of the embeddings in device blocks."""
        self.host_nbytes = 0
        self.encoded = 0
        """Embeddings that the tower made since start: counted by who asks for them."""
        self.hits = 0
        """Images that were found here, likewise."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Embedded]:
        """The least recently used first."""
        return iter(self._held.values())

    # ---- what is there

    def find(self, key: bytes) -> Embedded | None:
        """What is held of the image ``key``. Changes nothing."""
        return self._held.get(key)

    def blocks_of(self, count: int) -> int:
        """Blocks that ``count`` rows take."""
        return -(-count // self.block_rows)

    def ever_fits(self, count: int) -> bool:
        """Whether an embedding of ``count`` rows fits when nothing else is held."""
        return self.blocks_of(count) <= self.blocks

    @property
    def available(self) -> int:
        """Device blocks that nothing is in."""
        return len(self._free) + len(self._leaving)

    @property
    def settled(self) -> int:
        """Device blocks that nothing is in and that no plan in flight touches."""
        return len(self._free)

    def victims(self) -> list[Embedded]:
        """What may be evicted: all in device blocks without a pin, the least recently used first."""
        return [held for held in self._held.values() if not (held.on_host or held.pins)]

    # ---- changes

    def add(
        self, key: bytes, count: int, victims: Iterable[Embedded] | None = None, *, settled: bool = False
    ) -> Embedded | None:
        """Device blocks for ``count`` rows of the image ``key``, of which nothing is held. All or nothing.

        ``victims``: what may be evicted for it, first ones first; else ``victims``. With ``settled`` blocks
        that a plan in flight still touches are not enough, but what was evicted for them stays so: ask again
        after a commit. Raises EngineDead when the key is held.
        """
        if key in self._held:
            raise EngineDead("an embedding was added to a cache that has it")
        blocks = self._take(self.blocks_of(count), victims, settled)
        if blocks is None:
            return None
        held = self._held[key] = Embedded(key, count, blocks)
        self.nbytes += count * self._row_bytes
        return held

    def make_room(self, blocks: int, victims: Iterable[Embedded]) -> bool:
        """Evicts what is needed so that ``blocks`` are there for a writer from outside. False: not now; where
        plans in flight touch what is there, after they have committed."""
        return self._make_room(blocks, victims) and blocks <= len(self._free)

    def lift(
        self, held: Embedded, victims: Iterable[Embedded] | None = None, *, settled: bool = False
    ) -> bool:
        """Moves one that is in the host's blocks to the device's, as ``add`` finds them."""
        held.pins += 1  # what is evicted for it may need host blocks, and not these
        blocks = self._take(self.blocks_of(held.count), victims, settled)
        held.pins -= 1
        if blocks is None:
            return False
        self._ops.append(MoveMedia(blocks=ids(blocks), host=held.ids, up=True))
        self._host_free += held.blocks
        held.blocks, held.on_host, held.step = blocks, False, self.next_step
        self.host_nbytes -= held.count * self._row_bytes
        self.nbytes += held.count * self._row_bytes
        return True

    def op(self, op: Op) -> None:
        """``op`` goes out with the next plan, behind what was decided before."""
        self._ops.append(op)

    def touch(self, held: Embedded, step: int = -1) -> None:
        """Notes that it was used: by plan ``step``, or by none."""
        held.step = max(held.step, step)
        if not held.gone:
            self._held.move_to_end(held.key)

    def pin(self, held: Embedded) -> None:
        """Keeps it, and its blocks, where they are until ``unpin``."""
        held.pins += 1

    def unpin(self, held: Embedded) -> None:
        """The other side of one ``pin``. Raises EngineDead when there is none."""
        if held.pins < 1:
            raise EngineDead("an embedding was unpinned that has no pin")
        held.pins -= 1
        if held.gone and not held.pins:
            self._give_back(held)

    def drop(self, held: Embedded) -> None:
        """Forgets it: nobody finds it from now on. Its blocks are free, or will be without its pins."""
        if held.gone:
            return
        del self._held[held.key]
        self._leave(held)
        if self._dropped is not None:
            self._dropped(held)

    def clear(self) -> None:
        """Ranks have forgotten everything, and no plan is in flight. Pinned blocks stay out of use."""
        for held in self._held.values():
            self._leave(held)
        self._held.clear()
        self._ops.clear()
        self._free += self._leaving
        self._leaving.clear()

    # ---- steps

    @property
    def asks(self) -> bool:
        """Whether there are ops for the next plan."""
        return bool(self._ops)

    def take_ops(self, step: int) -> list[Op]:
        """The ops that go out with plan ``step``, which is sealed now."""
        ops, self._ops = self._ops, []
        self.next_step = step + 1
        return ops

    def committed(self, step: int) -> None:
        """``step`` and all before it have committed."""
        self._last_commit = step
        for block in [block for block, last in self._leaving.items() if last <= step]:
            del self._leaving[block]
            self._free.append(block)

    # ----

    def _take(self, number: int, victims: Iterable[Embedded] | None, settled: bool) -> list[int] | None:
        if not self._make_room(number, victims):
            return None
        if settled:
            return self._pop(number) if number <= len(self._free) else None
        blocks = [self._leaving.popitem(last=False)[0] for _ in range(min(number, len(self._leaving)))]
        return blocks + self._pop(number - len(blocks))

    def _make_room(self, number: int, victims: Iterable[Embedded] | None) -> bool:
        missing = number - self.available
        evicted = []
        for victim in self.victims() if victims is None else victims:
            if missing <= 0:
                break
            evicted.append(victim)
            missing -= len(victim.blocks)
        if missing > 0:
            return False
        for victim in evicted:
            self._evict(victim)
        return True

    def _pop(self, number: int) -> list[int]:
        return [self._free.pop() for _ in range(number)]

    def _evict(self, held: Embedded) -> None:
        """To the host's blocks, where there are enough; else it is gone."""
        if held.pins or held.on_host or held.gone:
            raise EngineDead("an embedding was evicted that is pinned, or not there")
        number = len(held.blocks)
        if not self._make_host_room(number, held.key):
            self.drop(held)
            return
        host = [self._host_free.pop() for _ in range(number)]
        self._ops.append(MoveMedia(blocks=held.ids, host=ids(host), up=False))
        held.step = self.next_step
        self._free_device(held)
        held.blocks, held.on_host = host, True
        self.nbytes -= held.count * self._row_bytes
        self.host_nbytes += held.count * self._row_bytes

    def _make_host_room(self, number: int, key: bytes) -> bool:
        """For ``number`` blocks of the image ``key``. What somebody needs goes last, and not for what nobody
        does."""
        if number > self.host_blocks:
            return False
        missing = number - len(self._host_free)
        leaving: list[Embedded] = []
        wanted = self._wanted or (lambda _: False)
        for needed in (False, True) if wanted(key) else (False,):
            for held in self._held.values():
                if missing <= 0:
                    break
                if held.on_host and not held.pins and wanted(held.key) == needed:
                    leaving.append(held)
                    missing -= len(held.blocks)
        if missing > 0:
            return False
        for held in leaving:
            self.drop(held)
        return True

    def _leave(self, held: Embedded) -> None:
        """It is in no index any more."""
        held.gone = True
        if held.on_host:
            self.host_nbytes -= held.count * self._row_bytes
        else:
            self.nbytes -= held.count * self._row_bytes
        if not held.pins:
            self._give_back(held)

    def _give_back(self, held: Embedded) -> None:
        if held.on_host:
            self._host_free += held.blocks
        else:
            self._free_device(held)
        held.blocks = []

    def _free_device(self, held: Embedded) -> None:
        if held.step > self._last_commit:
            self._leaving.update(dict.fromkeys(held.blocks, held.step))
        else:
            self._free += held.blocks
