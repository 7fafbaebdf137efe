"""Blocks for the rows of a plan: all at once where they are there, else one by one, which may preempt."""

from __future__ import annotations

import numpy as np

from weft.common.errors import EngineDead
from weft.scheduler.book import Book
from weft.scheduler.draft import DecodeRows, Draft
from weft.scheduler.sequence import Running, Sequence
from weft.types.plan import Op


class Reserver:
    """Makes block tables reach as far as the rows of a plan in the making need."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def grow(self, rows: DecodeRows, short: np.ndarray, draft: Draft) -> DecodeRows:
        """Makes the tables of the decode rows ``short`` (bool) reach as far as these need.

        All at once when blocks are there, else without their drafts; else one by one, in order, which may
        preempt. Returns the rows that can run.
        """
        book, columns = self._book, self._book.columns
        whole = draft.lacking is None
        if whole and self._grow_all(rows, short, draft):
            return rows
        if book.kv.drafts:
            rows = rows.without_drafts(short)
            short &= columns.num_scheduled[rows.slots] + 1 > columns.reserved[rows.slots]
            if whole and self._grow_all(rows, short, draft):
                return rows
        out = np.zeros(len(columns.gen), bool)
        for slot in rows.slots[short].tolist():
            sequence = book.tenants[slot]
            if sequence is None:  # preempted just now
                continue
            reserved = self.reserve(sequence, sequence.state, int(columns.num_scheduled[slot]) + 1, draft)
            out[slot] = reserved is None
            draft.grow(reserved or [])
        return rows.where((columns.gen[rows.slots] > 0) & ~out[rows.slots])

    def _grow_all(self, rows: DecodeRows, short: np.ndarray, draft: Draft) -> bool:
        """Makes the tables of all rows ``short`` reach as far as they need, or changes nothing."""
        columns, slots = self._book.columns, rows.slots[short]
        ends = columns.num_scheduled[slots] + rows.counts[short] + rows.next_k[short]
        grown = self._book.caches.grow(slots, ends)
        if grown is None:
            return False
        ops, columns.reserved[slots] = grown
        draft.grow(ops)
        return True

    def reserve(self, sequence: Sequence, run: Running, end: int, draft: Draft) -> list[Op] | None:
        """Makes the tables reach ``end``: the ops, or None when the sequence must sit out."""
        if end <= run.reserved:
            return []
        if draft.lacking is not None and sequence.key > draft.lacking:
            draft.lack(sequence)
            return None
        if not self._make_room(sequence, run, end, draft):
            if sequence.state is run:
                draft.lack(sequence)
            return None
        run.reserved = self._book.caches.reserved(end)
        return self._book.caches.reserve(run.slot, end)

    def _make_room(self, sequence: Sequence, run: Running, end: int, draft: Draft) -> bool:
        """Preempts until the blocks up to ``end`` are available. False: not in this plan.

        The victim is the last by key that is not protected; it may be the one that asks. Nobody is
        preempted while blocks that steps in flight still name will do, and nobody preempts itself while its
        own last step is in flight: that may free blocks, and computes tokens that need not be lost.
        """
        caches = self._book.caches
        while True:
            needed = caches.needed(run.slot, end)
            if caches.fits(needed):
                return True
            if caches.will_fit(needed):
                return False
            victim = next((s for s in reversed(self._book.running) if not s.protected), None)
            if victim is None or (victim is sequence and run.last_step > self._book.last_commit):
                return False
            self.preempt(victim, draft)
            if victim is sequence:
                return False

    def preempt(self, victim: Sequence, draft: Draft, *, yields: bool = False) -> None:
        """Takes a running sequence out of the plan, and its slot and blocks from it. See ``Book.preempt``."""
        held = victim.state
        if not isinstance(held, Running):
            raise EngineDead("a sequence is in the running queue that does not run")
        draft.drop(victim, held)
        draft.preempted = True
        self._book.preempt(victim, held, yields=yields)
