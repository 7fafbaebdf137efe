"""The digest of a slot table. Engine and ranks compare digests at every step before any computation.

Each rank computes a digest from the plans it received. A lost frame, swapped rows, a missed end of a
sequence, or a wrong block changes the next digest. A rank with a wrong digest stops.

    digest = XOR over live slots of hash(slot, gen, its AllocSlot, block tables, bound)
             ^ running hash of the other ops ^ hash(step, the step's rows in their order)
"""

from __future__ import annotations

import hashlib

import numpy as np

from weft.common.errors import EngineDead
from weft.common.splitmix import mix_array
from weft.types.frames import encode_part
from weft.types.plan import (
    AllocSlot,
    AppendBlocks,
    AppendEach,
    Encode,
    FreeSlot,
    Segment,
    SlotUpdate,
    StepPlan,
)

_U64 = np.uint64
_MASK = (1 << 64) - 1
#: Odd constants against cancellation: for the parts of a slot's hash, and for groups, entries, steps.
_SLOT, _GEN, _CONTENT, _TABLES, _BOUND = (_U64(0x9E3779B97F4A7C15 * (2 * i + 1) & _MASK) for i in range(5))
_KIND = 0xD6E8FEB86659FD93
_ENTRY = _U64(0xA0761D6478BD642F)
_BLOCK = _U64(0x8EBC6AF09C88C6E3)
_STEP = 0xE7037ED1A0B428DB


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class SlotDigest:
    """The digest of one rank's table of ``num_slots`` slots and ``kinds`` KV cache groups."""

    def __init__(self, num_slots: int, kinds: int) -> None:
        self._live = np.zeros(num_slots, bool)
        self._gen = np.full(num_slots, -1, np.int64)
        """[slots]; -1 for a free slot."""
        self._fixed = np.zeros(num_slots, _U64)
        """[slots], hash of slot, generation and all of AllocSlot."""
        self._tables = np.zeros(num_slots, _U64)
        self._bound = np.zeros(num_slots, _U64)
        self._entries = np.zeros((kinds, num_slots), np.int64)
        self._hash = np.zeros(num_slots, _U64)
        """[slots], contribution of each slot to the digest; 0 for a free slot."""
        self._others = 0

    def clear(self) -> None:
        """Free all slots, at the start of an epoch."""
        for column in (self._live, self._fixed, self._tables, self._bound, self._entries):
            column.fill(0)
        self._gen.fill(-1)
        self._hash.fill(0)
        self._others = 0

    def take(self, plan: StepPlan) -> int:
        """Apply ``plan`` and return the digest, 0 .. 2^64 - 1.

        Raises EngineDead if the plan contradicts the table: a slot outside the table, an allocation of an
        occupied slot without an earlier release in the same plan, or a row or update of a slot without a
        sequence or with another one.
        """
        touched = [slots for op in plan.ops if len(slots := self._apply(op))]
        rows = self._row(plan.prefill, touched) + 3 * self._row(plan.decode, touched)
        if touched:
            slots = touched[0] if len(touched) == 1 else np.concatenate(touched)
            known = self._fixed[slots] + self._tables[slots] * _TABLES + self._bound[slots] * _BOUND
            self._hash[slots] = mix_array(known)
        for op in plan.ops:
            if isinstance(op, FreeSlot) and not self._live[op.slot]:
                self._hash[op.slot] = 0
        table = int(np.bitwise_xor.reduce(self._hash))
        return table ^ self._others ^ (rows + plan.step * _STEP & _MASK)

    def _apply(self, op: SlotUpdate) -> np.ndarray:
        """Apply an update to the tables. Return the slots of the update, int64 [n]; [] without a slot.

        The hashes of the returned slots are out of date: the caller computes the hashes again. Raises
        EngineDead if the update contradicts the tables, as described at ``take``.
        """
        if isinstance(op, AppendEach):
            self._check(op.slots, None)
            at = self._places(op.kind)
            # Fancy indexing below would apply only one of two updates to the same slot.
            if len(set(op.slots.tolist())) < len(op.slots):
                raise EngineDead("blocks are appended twice to one slot")
            self._tables[op.slots] ^= self._blocks(op.kind, at[op.slots], op.blocks)
            at[op.slots] += 1
            return op.slots
        slot = getattr(op, "slot", None)
        if slot is None:
            self._fold(op)
            return np.empty(0, np.int64)
        slots = np.array([slot])
        if isinstance(op, AllocSlot):
            self._alloc(op, slots)
            return slots
        self._check(slots, np.array([op.gen]) if isinstance(op, FreeSlot) else None)
        if isinstance(op, FreeSlot):
            self._live[op.slot], self._gen[op.slot] = False, -1
        elif isinstance(op, AppendBlocks):
            at = self._places(op.kind)
            more = np.arange(at[op.slot], at[op.slot] + len(op.blocks))
            self._tables[op.slot] ^= np.bitwise_xor.reduce(self._blocks(op.kind, more, op.blocks))
            at[op.slot] += len(op.blocks)
        else:
            self._fold(op)
        return slots

    def _alloc(self, op: AllocSlot, slots: np.ndarray) -> None:
        """Occupy a slot with empty tables. Raises EngineDead if the slot is occupied or outside the table."""
        self._check_range(slots)
        if self._live[op.slot]:
            raise EngineDead(f"slot {op.slot} is allocated while generation {self._gen[op.slot]} is in it")
        self._live[op.slot], self._gen[op.slot] = True, op.gen
        content = _hash(encode_part(op))
        self._fixed[op.slot] = (op.slot * int(_SLOT) + op.gen * int(_GEN) + content * int(_CONTENT)) & _MASK
        self._tables[op.slot] = self._bound[op.slot] = 0
        self._entries[:, op.slot] = 0

    def _places(self, kind: int) -> np.ndarray:
        """Return the number of table entries of KV cache group ``kind``, [slots]; a writable view."""
        if not 0 <= kind < len(self._entries):
            raise EngineDead(f"blocks of cache kind {kind} are appended, and there is none")
        places: np.ndarray = self._entries[kind]
        return places

    def _blocks(self, kind: int, at: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return the hash of each of ``blocks`` as entry ``at`` of a table, uint64 [n]."""
        where = at.astype(_U64) * _ENTRY + _U64((kind + 1) * _KIND & _MASK)
        return mix_array(where + blocks.astype(_U64) * _BLOCK)

    def _fold(self, op: SlotUpdate) -> None:
        if isinstance(op, Encode):  # megabytes of pixels, which affect no slot table
            op = Encode(blocks=op.blocks, count=op.count, grid=op.grid, pixels=b"")
        self._others = _hash(self._others.to_bytes(8, "little") + encode_part(op))

    def _row(self, segment: Segment, touched: list[np.ndarray]) -> int:
        """Apply the rows of a segment. Return the hash of the rows in order."""
        if not segment.rows:
            return 0
        self._check(segment.slot, segment.gen)
        self._bound[segment.slot] = segment.start + segment.count
        touched.append(segment.slot)
        columns = (
            segment.slot,
            segment.gen,
            segment.start,
            segment.count,
            segment.logits,
            segment.sample,
            segment.next_k,
        )
        return _hash(b"".join([column.tobytes() for column in columns]))

    def _check_range(self, slots: np.ndarray) -> None:
        if len(slots) and (slots.min() < 0 or slots.max() >= len(self._live)):
            raise EngineDead(f"step names a slot outside the table, which has {len(self._live)}")

    def _check(self, slots: np.ndarray, gen: np.ndarray | None) -> None:
        """Raise EngineDead if a slot is free, outside the table, or, with ``gen``, of another generation."""
        self._check_range(slots)
        present = self._gen[slots]
        if gen is not None and (present == gen).all():
            return
        if (present < 0).any():
            raise EngineDead("step names a slot that is free")
        if gen is not None:
            raise EngineDead("a step names a slot without its sequence")
