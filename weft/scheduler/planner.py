"""Choose the rows of a step, in phases. Each phase is a method below.

Decode rows are reserved first. Then prefills in progress continue. Then new sequences are admitted, in the
order of ``weft.scheduler.policy.queue``.
"""

from __future__ import annotations

import numpy as np

from weft.config.sections.all import SchedulerSection, SpeculationSection
from weft.scheduler.crowding import batch_victim, choose_victim, num_batch, online_work
from weft.scheduler.images.whole_images import whole_end
from weft.scheduler.plan_builder import DecodeRows, PlanBuilder, Row
from weft.scheduler.policy.batch_rows import BatchRows
from weft.scheduler.policy.chunk import ChunkPolicy
from weft.scheduler.policy.draft_policy import DraftPolicy
from weft.scheduler.policy.fit import CostFitter
from weft.scheduler.reserve import Reserver
from weft.scheduler.sequence import FetchedTables, Running, Sequence
from weft.scheduler.state import SchedulerState
from weft.scheduler.steady import SteadyRows
from weft.types.plan import SlotUpdate
from weft.types.priority import BATCH_PRIORITY

NO_SLOT = -1
"""Slot number for cache queries about a sequence without a slot."""
SIDE_BYTES = 64 << 20
"""Maximum bytes beside KV (``Sequence.side_bytes``) of all running sequences together: forced experts, and
logprobs of the whole vocabulary of one step. A single sequence may take more. The frame of a step brings
forced experts to the ranks, so the limit also bounds the frame."""


class Planner:
    """Fills the steps of one scheduler. Admission and preemption change ``state``."""

    def __init__(
        self, state: SchedulerState, section: SchedulerSection, speculation: SpeculationSection | None
    ) -> None:
        """Create the planner. ``speculation``: adaptive or fixed draft counts; ``state.kv`` has the
        maximum."""
        self._state = state
        self._reserver = Reserver(state)
        self._threshold = section.long_prefill_token_threshold or section.max_num_batched_tokens
        self._most_running = min(section.max_num_seqs, state.kv.num_slots)
        self._exclusive = section.step_policy == "exclusive"
        target = section.itl_target_ms / 1e3
        self.chunks = ChunkPolicy(target, CostFitter()) if target else None
        """Sizes prompt chunks by predicted time; None without ``--itl-target-ms``."""
        self._batches = BatchRows(state.caches.unit)
        self.drafts: DraftPolicy | None = None
        """Chooses the number of drafts; None without speculation."""
        if state.kv.drafts:
            adaptive = speculation is None or speculation.speculative_adaptive
            self.drafts = DraftPolicy(state.kv.drafts, adaptive, state.columns)
        self.lacked = False
        """True if the last plan left out a row for lack of blocks."""
        self.starved = False
        """True if the last plan could not admit a sequence for lack of blocks."""

    def fill(self, builder: PlanBuilder) -> None:
        """Add the rows of a step to ``builder``, within the token budget. Sets ``starved``; the caller sets
        ``lacked``.

        Admits sequences, gives slots to sequences with received KV, and preempts sequences that lack blocks.
        """
        self.starved = self._state.media.short = False
        self._adopt_first()
        if self._exclusive:
            self._fill_exclusive(builder)
        else:
            self._fill_mixed(builder)

    # ---- the phases

    def _fill_mixed(self, builder: PlanBuilder) -> None:
        """Fill a step with decode rows, then with chunks of prefills in progress, then with new sequences."""
        self._batches.begin(*online_work(self._state))
        self._decode(builder)
        if self.chunks is not None:
            self.chunks.begin(builder.decode_shape)
        self._resume(builder)
        self._admit(builder)
        if self._batches.pauses and not builder.chunks and not len(builder.decodes.slots):
            self._batches.pauses = False  # no online prompt can go on in this step
            self._decode(builder)
            self._resume(builder)

    def _fill_exclusive(self, builder: PlanBuilder) -> None:
        """Fill a step with prefill rows, or with decode rows if there is no prefill row.

        After a plan that lacked blocks, decode rows come first: prefills would take the blocks again.
        """
        if not self.lacked:
            self._resume(builder)
            self._admit(builder)
        if not builder.chunks:
            self._decode(builder)
        if self.lacked and not len(builder.decodes.slots):
            self._resume(builder)
            self._admit(builder)

    def _decode(self, builder: PlanBuilder) -> None:
        """Add one decode row for every sequence whose known ids are all scheduled. May preempt sequences for
        blocks; rows without blocks are left out. A sequence that may be at its limit gets no row."""
        state, columns = self._state, self._state.columns
        slots = state.order()
        if not len(slots) and self.drafts is None:
            return
        if self._batches.pauses:
            slots = slots[: len(slots) - num_batch(state)]
        elif (steady := state.steady()) is not None and len(slots) <= builder.budget:
            self._decode_steady(steady, builder)
            return
        # Steps in flight may already have ended a sequence near the limit, so the check uses the scheduled
        # length.
        ready = ~columns.prefilling(slots) & (columns.num_scheduled[slots] + 1 < columns.limit[slots])
        rows = DecodeRows.plain(slots[ready][: max(builder.budget, 0)])
        if self.drafts is not None and not self.drafts.idle():
            rows = self._with_drafts(self.drafts, rows, builder.budget)
        ends = columns.num_scheduled[rows.slots] + rows.counts + rows.next_k
        short = ends > columns.reserved[rows.slots]
        if short.any():
            rows = self._reserver.grow(rows, short, builder)
        builder.add_decode(rows)

    def _decode_steady(self, steady: SteadyRows, builder: PlanBuilder) -> None:
        """Add the rows of the last step again. May preempt sequences for blocks, as ``_decode``."""
        rows, short = steady.rows, steady.short
        if short is not None:
            rows = self._reserver.grow(rows, short, builder)
            steady.grown()
        builder.steady = steady
        builder.add_decode(rows)

    def _with_drafts(self, policy: DraftPolicy, rows: DecodeRows, budget: int) -> DecodeRows:
        """Return the rows with the available drafts to verify and the number of drafts to propose, within all
        limits.

        Counts as one choice of ``policy``. If prompts wait, rows verify fewer drafts, so that the ``budget``
        has tokens left for prompts: one block, or one image that a chunk may not cut.
        """
        state, columns, slots = self._state, self._state.columns, rows.slots
        starts = columns.num_scheduled[slots]
        room = columns.limit[slots] - 1 - starts  # [rows], tokens left for each row
        prompts_wait = len(state.waiting) or len(slots) < len(state.running)
        counts = 1 + np.minimum(columns.drafts[slots], room - 1)
        for_prompts = max(state.kv.block_size, 0 if state.kv.media is None else state.kv.media.whole)
        rows = DecodeRows(slots, counts, rows.next_k).within(budget - (for_prompts if prompts_wait else 0))
        next_k = policy.choose(slots, starts, np.maximum(room - rows.counts - 1, 0))
        return DecodeRows(slots, rows.counts, next_k)

    def _resume(self, builder: PlanBuilder) -> None:
        """Add the next chunk of every prefill in progress, while budget and blocks last. May preempt
        sequences for blocks. A sequence with a lost image is returned to the router."""
        state, columns = self._state, self._state.columns
        slots = state.order()
        if builder.steady is not None and slots is builder.steady.slots:
            return  # every sequence decodes
        for sequence in state.in_slot[slots[columns.prefilling(slots)]].tolist():
            run = sequence.state
            if not isinstance(run, Running):  # preempted in the same step
                continue
            if builder.budget < 1:
                return
            start = int(columns.num_scheduled[run.slot])
            if self._return_if_image_lost(sequence, start):
                continue
            end = self._chunk_end(sequence, start, run.known, builder)
            if end <= start:
                continue
            if run.marks is not None:
                end = run.marks.cut(start, end, int(columns.snapshot[run.slot]))
            next_k = self._first_drafts(builder, sequence, run.slot, start, end, [])
            ops = self._reserver.reserve(sequence, run, end + next_k, builder)
            if ops is not None:
                self._add_chunk(builder, sequence, run, end, next_k, ops)

    def _adopt_first(self) -> None:
        """Give slots to the sequences with received KV at the head of the queue. These sequences decode in
        the same step."""
        waiting = self._state.waiting
        while waiting and (tables := (first := waiting.first()).tables) is not None and self._has_slot():
            if not self._has_room(first):
                return
            self._adopt(first, tables)

    def _adopt_behind(self) -> None:
        """Give slots to all waiting sequences with received KV, because the first sequence of the queue lacks
        blocks.

        A sequence with received KV already owns blocks, and releases the blocks only by running.
        """
        for sequence in list(self._state.waiting) if self._state.transfers.decodes else ():
            if sequence.tables is not None and self._has_slot() and self._has_room(sequence):
                self._adopt(sequence, sequence.tables)

    def _adopt(self, sequence: Sequence, tables: FetchedTables) -> None:
        run = self._state.adopt(sequence, tables)
        if self.drafts is not None:
            self.drafts.enter(run.slot)

    def _has_room(self, sequence: Sequence) -> bool:
        """Return True if ``sequence.side_bytes`` fits into ``SIDE_BYTES`` beside the running sequences, or if
        no running sequence has side bytes."""
        taken = sum(other.side_bytes for other in self._state.running) if sequence.side_bytes else 0
        return not taken or taken + sequence.side_bytes <= SIDE_BYTES

    def _has_slot(self) -> bool:
        return len(self._state.running) < self._most_running and self._state.slots.available() > 0

    def _admit(self, builder: PlanBuilder) -> None:
        """Admit waiting sequences in order, while slot, budget and blocks for all known ids are free. Sets
        ``starved`` if blocks are short.

        If only a slot is missing, ``choose_victim`` may choose a running sequence to give up a slot, unless
        steps in flight still name a released slot. A sequence with a lost image is returned to the router.
        """
        state = self._state
        if builder.lacking is not None or builder.preempted or not state.waiting:
            return
        promised = self._promised_or_loading()
        while state.waiting and builder.budget >= 1 and self._has_room(state.waiting.first()):
            sequence = state.waiting.first()
            yielding = None
            if len(state.running) >= self._most_running:
                if (yielding := choose_victim(state, sequence)) is None:
                    return
            elif not state.slots.available():
                return
            if sequence.tables is not None and yielding is None:
                self._adopt(sequence, sequence.tables)
                continue
            if sequence.protected and not state.guaranteed(sequence):
                return
            hashes, num_hit = state.lookup(sequence)
            if self._return_if_image_lost(sequence, num_hit):
                continue
            known = len(sequence.tokens)
            behind = min(known + 1, sequence.limit)  # an embedding sequence ends with the prompt
            needed = state.caches.needed(NO_SLOT, behind, num_hit, hashes)
            # A sequence with received KV owns its blocks. Prefills in progress and sequences with loads will
            # still take ``promised`` blocks, so admission must leave enough blocks.
            if sequence.tables is None and not state.caches.fits(wanted := _sums(needed, promised)):
                if self._preempt_batch(sequence, wanted, builder):
                    promised = self._promised_or_loading()
                    continue
                self.starved = True
                self._adopt_behind()
                return
            loads = sequence.tables is None and state.load_first(sequence, needed)
            if loads and (builder.rows or state.in_flight):
                return  # Most loads end before the next step. A later prompt now would cause delay.
            if not loads and yielding is not None:
                state.waiting.invite(sequence)
                self._reserver.preempt(yielding, builder, yields=True)
            if loads or yielding is not None:
                promised = self._promised_or_loading()
                continue
            end = self._first_end(sequence, num_hit, known, builder)
            if end <= num_hit:
                return  # no token for the first sequence: nothing behind may pass
            marks = state.marks(sequence, hashes, num_hit)
            if marks is not None:
                end = marks.cut(num_hit, end, num_hit)
            next_k = self._first_drafts(builder, sequence, state.slots.peek(), num_hit, end, hashes)
            # Blocks for the chunk only; ``promised`` grows by the blocks for the rest of the known ids.
            run, ops = state.admit(sequence, hashes, num_hit, end + next_k, marks)
            if self.drafts is not None:
                self.drafts.enter(run.slot)
            self._add_chunk(builder, sequence, run, end, next_k, ops)
            promised = _sums(promised, state.caches.needed(run.slot, behind))

    # ---- parts of the phases

    def _preempt_batch(self, sequence: Sequence, needed: list[int], builder: PlanBuilder) -> bool:
        """Preempt a running sequence of a batch to free blocks for ``sequence``. Return False, without any
        change, if there is no such sequence, or if the steps in flight will release enough blocks.

        ``needed``: blocks of each KV cache group.
        """
        victim = None if self._state.caches.will_fit(needed) else batch_victim(self._state, sequence)
        if victim is None:
            return False
        self._reserver.preempt(victim, builder, yields=True)
        return True

    def _return_if_image_lost(self, sequence: Sequence, start: int) -> bool:
        """If an image at or after position ``start`` is lost, return the sequence to the router. Return True
        if so.

        Applies only to a sequence with images that this group cannot encode.
        """
        if not sequence.relies or not self._state.media.lost(sequence, start):
            return False
        self._state.return_to_router(sequence, "an image of another group was evicted")
        return True

    def _first_end(self, sequence: Sequence, start: int, known: int, builder: PlanBuilder) -> int:
        """Return where the first chunk of an admitted sequence ends; ``start`` if the sequence must wait.

        A sequence with images to encode here waits while an earlier sequence lacks blocks for received
        images: the earlier sequence needs the image memory that running sequences release.
        """
        state = self._state
        others_wait = state.running and sequence.media and state.images.waits_before(sequence)
        if others_wait and state.media.encodes(sequence, start):
            return start
        return self._chunk_end(sequence, start, known, builder)

    def _chunk_end(self, sequence: Sequence, start: int, known: int, builder: PlanBuilder) -> int:
        """Return where the chunk from ``start`` ends; ``start`` if the step has no room for the chunk.

        Sets ``media.short`` if an image stops the chunk for lack of memory or because the image is still
        coming.
        """
        end = self._cut_end(sequence, start, known, builder)
        return whole_end(sequence, start, end, builder.budget, self._state.kv.media)

    def _cut_end(self, sequence: Sequence, start: int, known: int, builder: PlanBuilder) -> int:
        """Return where the chunk from ``start`` ends if a chunk may cut images; ``start`` without room."""
        most = min(builder.budget, self._threshold, known - start)
        if self.chunks is not None:
            most = self.chunks.room(start, most)
        batch = sequence.key[0] >= BATCH_PRIORITY and not self._exclusive
        if batch and (self._batches.pauses or not sequence.media):  # images need their whole length at once
            most = self._batches.room(most)
        end = start + most
        logits, sample = sequence.prefill_logits(start, end)
        # Prompt logprobs take as long as the rest of a step. So the number of such positions is limited.
        room = max(0, -(-builder.prompt_logits // sequence.logit_cost))
        if logits - sample > room:
            end = min(end, max(start, sequence.delivered) + room)
        if end <= start:
            return start
        end = self._state.caches.cut(start, self._state.media.reach(sequence, start, end, builder.step))
        if sequence.sends and end == known and end - start > 1 and self.drafts is not None:
            return min(end, self._state.caches.cut(start, end + 1) - 1)  # see ``_first_drafts``
        return end

    def _first_drafts(
        self, builder: PlanBuilder, sequence: Sequence, slot: int, start: int, end: int, hashes: list[bytes]
    ) -> int:
        """Return the number of drafts to propose after the last chunk of a prompt; 0 for earlier chunks or
        without blocks.

        A sender proposes at most one draft, so that the drafter's cache is complete. ``hashes``: of a
        sequence admitted with ``start`` cached tokens; [] for a running sequence.
        """
        known = len(sequence.tokens)
        room = sequence.limit - 2 - known
        if self.drafts is not None and sequence.sends and end == known:
            # Without a draft to propose, the drafter would leave out entries in its cache. The transfer sends
            # the drafter's cache, too.
            return int(known + 2 <= sequence.limit and self._state.caches.cut(start, end + 1) > end)
        if self.drafts is None or end < known or room < 1 or builder.lacking is not None:
            return 0
        next_k = self.drafts.first(room)
        caches = self._state.caches
        upto = end + next_k
        fits = caches.cut(start, upto) == upto and caches.fits(caches.needed(slot, upto, start, hashes))
        return next_k if fits else 0

    def _add_chunk(
        self,
        builder: PlanBuilder,
        sequence: Sequence,
        run: Running,
        end: int,
        next_k: int,
        ops: list[SlotUpdate],
    ) -> None:
        """Add the prefill row up to ``end`` to ``builder``, and count the row in the chunk policy.

        ``ops``: slot updates for the row. Image updates and the export of a sender are added.
        """
        start = int(self._state.columns.num_scheduled[run.slot])
        if self.chunks is not None:
            self.chunks.took(start, end - start)
        self._batches.took(end - start, sequence.key[0] >= BATCH_PRIORITY)
        logits, sample = sequence.prefill_logits(start, end)
        if sequence.media:
            ops = [*ops, *self._state.media.take(sequence, run.slot, start, end, builder.step)]
        if sequence.sends:
            ops = [*ops, *self._state.transfers.export(sequence, start, end)]
        builder.add_prefill(Row(sequence, run, start, end - start, logits, sample, next_k, ops))

    def _promised_or_loading(self) -> list[int]:
        """Return the blocks of each KV cache group that an admission must leave: ``promised``, and the blocks
        of sequences with loads at the admission."""
        loads = self._state.loads
        return self.promised() if loads is None else _sums(self.promised(), loads.reserved())

    def promised(self) -> list[int]:
        """Return the blocks of each KV cache group that prefills in progress still need."""
        state = self._state
        total = [0] * len(state.caches.kinds)
        slots = state.order()
        for slot in slots[state.columns.prefilling(slots)].tolist():
            behind = min(int(state.columns.known[slot]) + 1, int(state.columns.limit[slot]))
            needed = state.caches.needed(slot, behind)
            total = [t + n for t, n in zip(total, needed, strict=True)]
        return total


def _sums(one: list[int], other: list[int]) -> list[int]:
    """Return the sums of blocks of each KV cache group."""
    return [a + b for a, b in zip(one, other, strict=True)]
