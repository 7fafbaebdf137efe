"""Recurrent states in the prefix cache: snapshots, and the boundaries of snapshots.

A slot has the state after the last position and needs no block. A block has a copy: the state after a prefix.
A sequence with exactly the same prefix can start from the copy; earlier snapshots are not needed.

    positions   0 ......... boundary ....... num_scheduled
    blocks          [one snapshot]           the live state, in the slot

Snapshots are optional. A snapshot outside the plans in flight can be evicted for a new snapshot; if no
snapshot is evictable, no new one is made. A snapshot has a reference while a plan with its save or load is in
flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.config.resolved import PoolSpec
from weft.kv.pool import NULL_BLOCK, BlockPool
from weft.types.plan import LoadState, SaveState, SlotUpdate
from weft.types.transfer import Blocks

DECODE_STRIDE = 64
"""Positions between two snapshots of a decoding sequence, unless the prompt stride is smaller."""


@dataclass(frozen=True, slots=True)
class SnapshotMarks:
    """The boundaries at which a sequence saves snapshots, and the resulting chunk ends.

    Boundaries are multiples of ``unit``. Below ``known``, the number of ids at admission, chunks end

    * at each of ``ends``: the last boundary before the last known id, for requests with the same or a longer
      prompt; and the *branch*, where the cached entries of other sequences end, for requests with the same
      prefix (after Marconi, arXiv 2411.19379);
    * where a snapshot is due, ``stride`` after the last snapshot, at the last boundary inside the chunk. Such
      a snapshot costs no extra step.

    From ``known`` on, a snapshot every ``decode_stride`` serves the next turn of a chat; only the newest is
    kept.
    """

    unit: int
    stride: int
    known: int
    ends: tuple[int, ...]
    """In ascending order."""

    @property
    def decode_stride(self) -> int:
        return min(self.stride, DECODE_STRIDE)

    def cut(self, start: int, end: int, last: int) -> int:
        """Return where a chunk from ``start`` ends, at most ``end``. ``last``: position of the last
        snapshot."""
        for mark in self.ends:
            if start < mark < end:
                return mark
        boundary = end // self.unit * self.unit
        due = start < boundary < self.known and boundary - last >= self.stride
        return boundary if due else end

    def wants(self, boundary: int, last: int) -> bool:
        """Return True if a snapshot is wanted at ``boundary``. The sequence must be exactly at
        ``boundary``."""
        if boundary in self.ends:
            return True
        return boundary - last >= (self.stride if boundary < self.known else self.decode_stride)


def marks_for(unit: int, stride: int, known: int, num_hit: int, branch: int) -> SnapshotMarks:
    """Return the marks of a sequence of ``known`` ids with a hit of ``num_hit``.

    All arguments are in tokens. ``unit``: boundaries are multiples of ``unit``. ``stride``: distance of the
    snapshots of a prompt, raised to ``unit`` if smaller. ``branch``: length of the prefix found in the KV
    cache groups with block tables. Ends too close behind the hit are left out.
    """
    stride = max(stride, unit)
    ends = {(known - 1) // unit * unit, min(branch, known - 1) // unit * unit}
    # Each end costs a shorter chunk. A snapshot must save at least the decode stride.
    least = num_hit + min(stride, DECODE_STRIDE)
    return SnapshotMarks(unit, stride, known, tuple(sorted(end for end in ends if end >= least)))


@dataclass(slots=True)
class _Saving:
    """A snapshot in the making."""

    slot: int
    block: int
    key: bytes
    sound: bool = True
    """True if the snapshot may be inserted when the step commits."""


class StateGroup:
    """The snapshots of one recurrent KV cache group. Slots have no block tables here: ``needed`` is
    always 0."""

    slides = True

    def __init__(self, number: int, spec: PoolSpec, base_block: int) -> None:
        self.number = number
        self.block_size = spec.block_size
        self.num_blocks = spec.num_blocks
        self.stride = spec.stride
        self._base = base_block
        self.pool = BlockPool(spec.num_blocks)
        self._loaded: dict[int, int] = {}  # slot -> block loaded by the first plan
        self._fetched: dict[int, int] = {}  # number of a fetch -> destination block of the state
        self._saving: dict[int, list[_Saving]] = {}  # step -> snapshots saved by the plan
        self._newest: dict[int, bytes] = {}  # slot -> key of the snapshot to be replaced by the next
        self._owner: dict[bytes, int] = {}  # inverse of _newest

    # ---- interface of all KV cache groups

    def available(self) -> int:
        return self.pool.available()

    def pending(self) -> int:
        return self.pool.pending()

    def hit(self, hashes: Sequence[bytes], limit: int) -> int:
        unit = self.block_size
        # Longest first: any one snapshot is enough to continue.
        for boundary in range(min(limit, len(hashes) * self._base) // unit * unit, 0, -unit):
            if self.pool.find(hashes[boundary // self._base - 1]) != NULL_BLOCK:
                return boundary
        return 0

    def needed(self, slot: int, upto: int, num_hit: int = 0, hashes: Sequence[bytes] = ()) -> int:
        return 0

    def acquire(self, slot: int, hashes: Sequence[bytes], num_hit: int, upto: int) -> list[SlotUpdate]:
        if not num_hit:
            return []
        key = hashes[num_hit // self._base - 1]
        block = self.pool.find(key)
        self.pool.share(block)
        self._loaded[slot] = block
        self._keep(key)
        return [LoadState(slot=slot, kind=self.number, block=block)]

    def reserve(self, slot: int, upto: int) -> list[SlotUpdate]:
        return []

    def short(self, slots: Sequence[int], upto: Sequence[int]) -> list[int]:
        return [0] * len(slots)

    def grow(self, slots: Sequence[int], short: Sequence[int]) -> list[SlotUpdate]:
        return []

    def cut(self, start: int, end: int) -> int:
        return end

    def insert(self, slot: int, committed: int, hashes: Sequence[bytes]) -> None:
        return

    def slide(self, slot: int, committed: int, after_step: int) -> None:
        """Release the loaded snapshot: the plan with the load has committed."""
        self._unload(slot, after_step)

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        if not self._loaded:
            return
        for slot, step in zip(slots.tolist(), after_step.tolist(), strict=True):
            self._unload(slot, step)

    def release(self, slot: int, after_step: int) -> None:
        self._unload(slot, after_step)
        if (block := self._fetched.pop(slot, None)) is not None:
            self.pool.release(block, after_step)
        key = self._newest.pop(slot, None)
        if key is not None:
            del self._owner[key]

    def names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        # Snapshots of steps in flight are not in the index yet.
        made = {one.key for savings in self._saving.values() for one in savings if one.sound}
        return next(([key] for key in reversed(hashes) if key in made or self.has(key)), [])

    def committed(self, step: int) -> None:
        self.pool.committed(step)
        for due in [s for s in self._saving if s <= step]:
            for saving in self._saving.pop(due):
                if saving.sound:
                    self.pool.insert(saving.block, saving.key)
                self.pool.release(saving.block, due)

    def reset(self) -> None:
        self.pool.reset()
        for by_slot in (self._loaded, self._fetched, self._saving, self._newest, self._owner):
            by_slot.clear()

    def most(self, upto: int) -> int:
        return 0

    def least(self, upto: int) -> int:
        return 0

    def fetch_hit(self, hashes: Sequence[bytes], limit: int, position: int) -> int:
        return limit  # the state after `position` tokens is always sent

    def fetch_needed(self, hashes: Sequence[bytes], start: int, position: int, upto: int) -> int:
        return 1

    def fetch(
        self,
        fetch: int,
        hashes: Sequence[bytes],
        start: int,
        position: int,
        upto: int,
        sent_block: int,
    ) -> Blocks:
        block = self._fetched[fetch] = self.pool.take()
        return Blocks(first=0, ids=np.asarray([block], "<i4").tobytes())

    def adopt(self, fetch: int, slot: int) -> list[SlotUpdate]:
        block = self._loaded[slot] = self._fetched.pop(fetch)
        return [LoadState(slot=slot, kind=self.number, block=block)]

    def table(self, slot: int, position: int) -> Blocks:
        return Blocks(first=0, ids=b"")

    # ---- snapshots

    def take(self, slot: int, after_step: int) -> tuple[SlotUpdate, int]:
        """Save the state of ``slot`` to a private block. Return (slot update, block).

        The block is free when ``after_step`` has committed, unless pinned. A block must be available.
        """
        block = self.pool.take()
        self.pool.release(block, after_step)
        return SaveState(slot=slot, kind=self.number, block=block), block

    def has(self, key: bytes) -> bool:
        """Return True if there is a committed snapshot of ``key``."""
        return self.pool.find(key) != NULL_BLOCK

    def save(self, slot: int, key: bytes, back: int, keep: bool, step: int) -> SlotUpdate | None:
        """Save a snapshot of ``key`` in plan ``step`` and return the slot update. Return None if the snapshot
        exists or no block is free.

        The snapshot can be hit once ``step`` has committed. ``back``: positions between the snapshot and the
        present state. Without ``keep``, the snapshot replaces the slot's previous snapshot without ``keep``.
        """
        if self.has(key):
            self._touch(key, keep)
            return None
        if not keep:
            self._replace(slot)
        if not self.pool.available():
            return None
        block = self.pool.take()
        self._saving.setdefault(step, []).append(_Saving(slot, block, key))
        # Another slot may already own the snapshot of the same prefix.
        if not keep and key not in self._owner:
            self._newest[slot] = key
            self._owner[key] = slot
        return SaveState(slot=slot, kind=self.number, block=block, back=back)

    def spoil(self, slot: int) -> None:
        """Invalidate the unfinished snapshots of the slot, because a step failed."""
        for savings in self._saving.values():
            for saving in savings:
                saving.sound = saving.sound and saving.slot != slot

    # ----

    def _unload(self, slot: int, after_step: int) -> None:
        block = self._loaded.pop(slot, None)
        if block is not None:
            self.pool.release(block, after_step)

    def _touch(self, key: bytes, keep: bool) -> None:
        """Mark ``key`` as most recently used."""
        block = self.pool.find(key)
        self.pool.share(block)
        # A share followed by a release moves the block to the end of the LRU list.
        self.pool.release(block, -1)
        if keep:
            self._keep(key)

    def _keep(self, key: bytes) -> None:
        """Keep ``key``: newer snapshots of the slot no longer replace the snapshot."""
        slot = self._owner.pop(key, None)
        if slot is not None:
            del self._newest[slot]

    def _replace(self, slot: int) -> None:
        """Free the newest snapshot of the slot, unless a plan in flight loads the snapshot."""
        key = self._newest.pop(slot, None)
        if key is not None:
            del self._owner[key]
            self.pool.forget(key)
