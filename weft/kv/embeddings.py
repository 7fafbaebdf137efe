"""Embeddings of images as a cache: which embeddings are stored, in which blocks, and the eviction order.

Pure: nothing is moved here. The work of the ranks is described by updates of the next plan, in the order of
decisions. Blocks are ids 1 .. n of a rank's pool; 0 is the null block.

    add ──────────────> in device blocks ──drop──> gone
                          │          ^
              evicted, in the order of last use
                          v          │ lifted, when needed again
                      in host blocks ──evicted, or dropped──> gone

An embedding is in one tier. A pinned embedding is neither moved nor evicted. The blocks stay out of use until
the last pin is released, even if the embedding is gone (``drop``, ``clear``).

Later plans may overwrite the blocks of an evicted embedding at once, because ranks execute plans in order. A
writer outside the plans (a transfer) only gets *settled* blocks, which no plan in flight touches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from weft.common.errors import EngineDead
from weft.types.media_item import BLOCK_ROWS
from weft.types.plan import MoveMedia, SlotUpdate

__all__ = ["BLOCK_ROWS", "Embedded", "EmbeddingCache", "ids"]


def ids(blocks: Iterable[int]) -> bytes:
    """Return ``blocks`` in the format of plan updates: int32 bytes."""
    return np.fromiter(blocks, np.int32).tobytes()


class Embedded:
    """An embedding in the cache. Only ``EmbeddingCache`` changes an embedding."""

    __slots__ = ("blocks", "count", "gone", "key", "on_host", "pins", "ready", "step", "whole")

    def __init__(self, key: bytes, count: int, blocks: list[int]) -> None:
        self.key, self.count, self.blocks = key, count, blocks
        """Block ids in the present tier."""
        self.on_host = False
        self.pins = 0
        self.gone = False
        """True after removal from the index. The blocks stay until the last pin is released."""
        self.ready = True
        """False while the content is still being received: the blocks are reserved but not readable."""
        self.whole = True
        """False while each rank has only a share of the rows."""
        self.step = -1
        """The last plan with a write or read of the device blocks."""

    @property
    def ids(self) -> bytes:
        """The block ids in the format of plan updates."""
        return ids(self.blocks)


class EmbeddingCache:
    """The embeddings of one group. Every rank has the same blocks."""

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
        """Create an empty cache of ``blocks`` device blocks and ``host_blocks`` host blocks.

        ``dropped`` is called for each dropped embedding, but not by ``clear``. ``wanted`` returns True if a
        sequence needs the image of a key; such an embedding leaves the host blocks only for another wanted
        one. Raises ValueError for invalid sizes.
        """
        if min(blocks, host_blocks) < 0 or min(row_bytes, block_rows) < 1:
            raise ValueError("a pool of embeddings has at least 0 blocks, of at least 1 row and byte")
        self.blocks, self.host_blocks, self.block_rows = blocks, host_blocks, block_rows
        self._row_bytes = row_bytes
        self._dropped = dropped
        self._wanted = wanted
        self._held: OrderedDict[bytes, Embedded] = OrderedDict()
        """Key -> embedding of both tiers, least recently used first."""
        self._free = list(range(blocks, 0, -1))
        """Settled free blocks; the last is taken first."""
        self._leaving: OrderedDict[int, int] = OrderedDict()
        """Free block still touched by plans in flight -> the last such plan."""
        self._host_free = list(range(host_blocks, 0, -1))
        self._ops: list[SlotUpdate] = []
        self._last_commit = -1
        self.next_step = 0
        """Number of the next plan."""
        self.nbytes = 0
        """Bytes of the embeddings in device blocks."""
        self.host_nbytes = 0
        self.encoded = 0
        """Number of embeddings made by the tower since start. Callers count."""
        self.hits = 0
        """Number of images found in the cache since start. Callers count."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Embedded]:
        """Iterate over the embeddings, least recently used first."""
        return iter(self._held.values())

    # ---- queries

    def find(self, key: bytes) -> Embedded | None:
        """Return the embedding of the image ``key``, or None. Changes nothing."""
        return self._held.get(key)

    def blocks_of(self, count: int) -> int:
        """Return the number of blocks for ``count`` rows."""
        return -(-count // self.block_rows)

    def ever_fits(self, count: int) -> bool:
        """Return True if an embedding of ``count`` rows fits into an empty cache."""
        return self.blocks_of(count) <= self.blocks

    @property
    def available(self) -> int:
        """Number of free device blocks."""
        return len(self._free) + len(self._leaving)

    @property
    def settled(self) -> int:
        """Number of free device blocks not touched by any plan in flight."""
        return len(self._free)

    def victims(self) -> list[Embedded]:
        """Return the evictable embeddings: in device blocks, without a pin, least recently used first."""
        return [held for held in self._held.values() if not (held.on_host or held.pins)]

    # ---- changes

    def add(
        self, key: bytes, count: int, victims: Iterable[Embedded] | None = None, *, settled: bool = False
    ) -> Embedded | None:
        """Reserve device blocks for ``count`` rows of the image ``key``. Return None if blocks are missing.

        ``victims``: evictable embeddings, in order; default ``self.victims()``. ``settled``: use only blocks
        not touched by any plan in flight. If such blocks are missing, the evictions still happen: try again
        after a commit. Without enough victims, nothing changes. Raises EngineDead if the key is stored.
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
        """Evict as much as needed for ``blocks`` settled blocks. Return True if the blocks are free now.

        On False with enough victims, the evictions have happened, but plans in flight may still touch the
        blocks: try again after a commit. Without enough victims, nothing changes.
        """
        return self._make_room(blocks, victims) and blocks <= len(self._free)

    def lift(self, held: Embedded, victims: Iterable[Embedded] | None = None) -> bool:
        """Move an embedding from host blocks to device blocks, reserved as in ``add``, with an update of the
        next plan. Return False if blocks are missing."""
        # An eviction for the device blocks may need host blocks, but must not take `held.blocks`.
        held.pins += 1
        blocks = self._take(self.blocks_of(held.count), victims, settled=False)
        held.pins -= 1
        if blocks is None:
            return False
        self._ops.append(MoveMedia(blocks=ids(blocks), host=held.ids, up=True))
        self._host_free += held.blocks
        held.blocks, held.on_host, held.step = blocks, False, self.next_step
        self.host_nbytes -= held.count * self._row_bytes
        self.nbytes += held.count * self._row_bytes
        return True

    def op(self, op: SlotUpdate) -> None:
        """Append ``op`` to the updates of the next plan."""
        self._ops.append(op)

    def touch(self, held: Embedded, step: int = -1) -> None:
        """Mark as most recently used, and as touched by plan ``step`` if given."""
        held.step = max(held.step, step)
        if not held.gone:
            self._held.move_to_end(held.key)

    def pin(self, held: Embedded) -> None:
        """Pin the embedding: embedding and blocks stay in place until ``unpin``."""
        held.pins += 1

    def unpin(self, held: Embedded) -> None:
        """Release one pin. Raises EngineDead if there is none. The last pin of a gone embedding frees the
        blocks."""
        if held.pins < 1:
            raise EngineDead("an embedding was unpinned that has no pin")
        held.pins -= 1
        if held.gone and not held.pins:
            self._give_back(held)

    def drop(self, held: Embedded) -> None:
        """Remove the embedding from the index and call ``dropped``. The blocks are free, or will be after the
        last pin. Idempotent: a second call does nothing."""
        if held.gone:
            return
        del self._held[held.key]
        self._leave(held)
        if self._dropped is not None:
            self._dropped(held)

    def forget_all(self) -> None:
        """Drop every embedding."""
        for held in list(self._held.values()):
            self.drop(held)

    def clear(self) -> None:
        """Forget everything: the ranks lost all embeddings and no plan is in flight. Pinned blocks stay out
        of use."""
        for held in self._held.values():
            self._leave(held)
        self._held.clear()
        self._ops.clear()
        self._free += self._leaving
        self._leaving.clear()

    # ---- steps

    @property
    def asks(self) -> bool:
        """True if there are updates for the next plan."""
        return bool(self._ops)

    def take_ops(self, step: int) -> list[SlotUpdate]:
        """Return and clear the updates for plan ``step``, which is being frozen."""
        ops, self._ops = self._ops, []
        self.next_step = step + 1
        return ops

    def committed(self, step: int) -> None:
        """Note the commit of ``step`` and all earlier steps: blocks freed by the steps are now settled."""
        self._last_commit = step
        for block in [block for block, last in self._leaving.items() if last <= step]:
            del self._leaving[block]
            self._free.append(block)

    # ----

    def _take(self, number: int, victims: Iterable[Embedded] | None, settled: bool) -> list[int] | None:
        """Evict victims as needed and return ``number`` free device blocks; None if blocks are missing."""
        if not self._make_room(number, victims):
            return None
        if settled:
            return self._pop(number) if number <= len(self._free) else None
        # Plans run in order, so blocks of earlier plans serve first. Settled blocks stay free for transfers.
        blocks = [self._leaving.popitem(last=False)[0] for _ in range(min(number, len(self._leaving)))]
        return blocks + self._pop(number - len(blocks))

    def _make_room(self, number: int, victims: Iterable[Embedded] | None) -> bool:
        """Evict the first victims until ``number`` device blocks are free. Return False, without any change,
        if the victims are not enough."""
        missing = number - self.available
        if missing <= 0:
            return True
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
        """Move an embedding to host blocks; drop the embedding if host blocks are missing."""
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
        """Free ``number`` host blocks for the image ``key``. Return False, without any change, if impossible.

        Wanted embeddings are dropped last, and only for a wanted key.
        """
        if number > self.host_blocks:
            return False
        missing = number - len(self._host_free)
        leaving: list[Embedded] = []
        wanted = self._wanted or (lambda _: False)
        # First pass: embeddings without a need. Second pass, for a wanted key only: needed embeddings.
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
        """Mark the embedding as gone and free the blocks unless pinned."""
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
