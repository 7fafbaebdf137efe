"""The live sequences with their slots and blocks. Only this module allocates and frees slots and blocks.

The operations of ``SchedulerState`` keep sequences, queues, requests and caches consistent. The planner and
``commit`` decide when to call each operation.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from weft.common.errors import ErrorInfo, Unavailable
from weft.config.resolved import KVConfig
from weft.kv.caches import Caches, make_cache_groups
from weft.kv.hashing import HashChain, media_keys, request_root, salted_root
from weft.kv.slots import SlotTable
from weft.kv.snapshots import SnapshotMarks
from weft.scheduler.adapters import AdapterBook
from weft.scheduler.counts import Counts
from weft.scheduler.images.image_transfers import ImageTransfers
from weft.scheduler.images.media_book import MediaBook
from weft.scheduler.misses import Misses
from weft.scheduler.pins import Pins
from weft.scheduler.policy.queue import FairQueue, SequenceQueue
from weft.scheduler.policy.retention import Retention
from weft.scheduler.sequence import (
    Blocked,
    BlockedOnFirstSample,
    Ended,
    FetchedTables,
    LiveRequest,
    Running,
    Sequence,
    Waiting,
)
from weft.scheduler.slot_columns import SlotColumns
from weft.scheduler.steady import SteadyRows
from weft.scheduler.transfer_book import TransferBook
from weft.types.plan import SlotUpdate, StepPlan
from weft.types.transfer import TransferKey

if TYPE_CHECKING:
    from weft.scheduler.loads import Loads


MIXED = b"mixed"
"""Value of ``Sequence.weights`` for a sequence that has run through a change of the weights."""


class SchedulerState:
    """The complete state of a scheduler. Raises ConfigError when the caches cannot hold one sequence."""

    def __init__(
        self, kv: KVConfig, max_chunk: int, remembered_bytes: int = 0, retention: float = 0, places: int = 0
    ) -> None:
        """``max_chunk``: maximum tokens of one row. ``remembered_bytes``: memory for earlier prompts.
        ``retention``: seconds for which the blocks of a session are retained. ``places``: places for LoRA
        adapters."""
        self.kv = kv
        self.caches = Caches(make_cache_groups(kv, max_chunk), kv.max_model_len)
        self.pins = Pins(self.caches)
        self.transfers = TransferBook(self.caches, self.pins)
        self.media = MediaBook(kv.media)
        self.images = ImageTransfers(self.media)
        self.slots = SlotTable(kv.num_slots)
        self.columns = SlotColumns(kv.num_slots)
        self.in_slot = np.full(kv.num_slots, None, object)
        """The running sequence of each slot, [slots]; None for a free slot."""
        self.live: dict[int, Sequence] = {}
        self.misses = Misses(kv, self.caches, self.live, self.columns, remembered_bytes)
        self.retention = Retention(self.caches, kv.block_size, retention if kv.enable_prefix_caching else 0)
        self.requests: dict[int, LiveRequest] = {}
        self.weights = b""
        """Name of the weights in use, in the roots of chains: see ``weft.types.weights.prefix_name``."""
        self.waiting = FairQueue()
        self.running = SequenceQueue()
        self.loads: Loads | None = None
        """Loads from a KV tier; None without a tier."""
        self.ops: list[SlotUpdate] = []
        """Slot updates without a row. The next plan carries all of them."""
        self.adapters = AdapterBook(places, lambda op: self.ops.append(op))
        self._order: np.ndarray | None = None
        """Cached result of ``order``; None after a change of a slot."""
        self._steady: SteadyRows | None = None
        self._last_order: np.ndarray | None = None
        """The order of the slots at the last call of ``steady``."""
        self.in_flight: deque[StepPlan] = deque()
        """Plans without a commit, oldest first."""
        self.last_commit = -1
        self.counts = Counts(drafts=[0] * kv.drafts, drafts_accepted=[0] * kv.drafts)

    # ---- arrival and end

    def arrive(self, sequence: Sequence) -> None:
        """Add a new sequence: to the queue, or blocked, or waiting for the first sample of the prompt.

        A sequence prefilled by another group is always blocked until the KV arrives. The second live sequence
        of a prompt makes the prompt's blocks shareable, also without prefix caching.
        """
        self.live[sequence.id] = sequence
        self.adapters.arrive(sequence)
        self.media.arrive(sequence)
        self.waiting.enter(sequence)
        request = self.requests.get(sequence.request)
        if request is None:
            request = self.requests[sequence.request] = LiveRequest(first_sample=sequence)
        else:
            self._share(request)
        request.members[sequence.id] = sequence
        # KV from another group does not depend on the first sample: such a sequence does not wait for the
        # first sample.
        if sequence.fetches:
            sequence.move(Blocked())
        elif request.first_sample is sequence or request.prompt_computed:
            self._enqueue(sequence)

    def arrived(self, sequence: Sequence) -> None:
        """Clear ``blocked`` and unblock a sequence, unless images or KV are missing. Idempotent."""
        sequence.blocked = False
        self._enqueue_if_ready(sequence)

    def loaded(self, sequence: Sequence) -> None:
        """Unblock a sequence, unless other input is missing: the load from a KV tier has ended."""
        self._enqueue_if_ready(sequence)

    def images_received(self, sequence: Sequence) -> None:
        """Unblock a sequence, unless other input is missing: all images from other groups are received."""
        sequence.blocked_images = False
        self._enqueue_if_ready(sequence)

    def end(self, sequence: Sequence, finish: str, error: ErrorInfo | None = None) -> None:
        """End a live sequence in any state. Free the slot and the blocks, and cancel open transfers with
        ``error``.

        Makes no client event: the caller does. After ``finish`` "error", unfinished snapshots and embeddings
        of the sequence are dropped. After other ends, the blocks of a session are retained.
        """
        state = sequence.state
        tables = sequence.tables
        if self.loads is not None:
            self.loads.leaves(sequence, failed=finish == "error")
        sequence.move(Ended(finish))
        # A failed sequence must leave no snapshot or embedding behind: the content may be wrong.
        if isinstance(state, Running):
            if finish == "error":
                self.caches.spoil(state.slot)
                self.media.spoil(sequence)
            elif sequence.session and sequence.chain is not None:
                computed = int(self.columns.num_computed[state.slot])
                self.retention.ended(sequence.session, sequence.chain.hashes, computed)
            self._release(sequence, state)
        elif isinstance(state, Waiting):
            self.waiting.remove(sequence)
        if tables is not None:
            self.caches.release(tables.number, -1)
        del self.live[sequence.id]
        self.waiting.leave(sequence)
        self._leave(sequence)
        for ready in self.adapters.leave(sequence):
            self._enqueue_if_ready(ready)
        self.images.ended(sequence, finish, error)
        if sequence.transfer is not None:
            self.transfers.ended(sequence, finish, error)

    def return_to_router(self, sequence: Sequence, why: str, error: ErrorInfo | None = None) -> None:
        """End a sequence that has, or had, a transfer, and return the sequence to the router. Any engine may
        continue the sequence.

        Adds the terminal event to ``transfers.events``. ``error``: why the transfer failed; the event carries
        ``error``.
        """
        self.end(sequence, "evicted", Unavailable(why).info())
        self.transfers.returned(sequence, error)

    def preempt(self, sequence: Sequence, run: Running, *, yields: bool = False) -> None:
        """Preempt a running sequence: free slot and blocks, back to the old place in the queue, recomputed
        later.

        A sequence with a transfer is returned to the router instead: another group owns or expects the
        blocks. Both count as preemptions. ``yields``: the sequence makes room for a waiting sequence and does
        not lack blocks.
        """
        if sequence.transfer is not None:
            self.counts.preemptions += 1
            self.return_to_router(sequence, "the sequence was evicted for other sequences")
            return
        if self.loads is not None:
            self.loads.leaves(sequence, preempted=True)
        sequence.move(Waiting())
        self._release(sequence, run)
        self.media.wait(sequence)
        sequence.preemptions += 1
        sequence.yielded += yields
        self.counts.preemptions += 1
        self.waiting.add(sequence)

    def requeue(self) -> list[Sequence]:
        """Requeue all running sequences after ranks were lost and the group formed anew. Return the requeued
        sequences.

        Plans in flight and all cached blocks are dropped. A pinned block stays out of use, because the owner
        of the pin may not know of the loss. The requeue does not count as a preemption. A sequence with a
        transfer and with blocks or a slot is returned to the router instead.
        """
        for sequence in list(self.live.values()):
            if sequence.transfer is not None and (isinstance(sequence.state, Running) or sequence.tables):
                self.return_to_router(sequence, "the processes that had the sequence's cache were lost")
        for key in list(self.transfers.unsaved):
            self.release_sender(key)
        ran = self.running.snapshot()
        for sequence in ran:
            sequence.move(Waiting())
            sequence.loads_left = 1  # the blocks on the device are lost, but the KV tier may have copies
            self.running.remove(sequence)
            self.waiting.stop(sequence)
            self.waiting.add(sequence)
        self.in_flight.clear()
        self.ops.clear()
        self.adapters.restore()
        self.caches.reset()
        self.images.clear()
        self.media.clear()
        self.retention.clear()
        self.slots.reset()
        self.columns.gen[:] = 0
        self.in_slot[:] = None
        self._order = None
        self.counts.recoveries += 1
        self.counts.requeued += len(ran)
        if self.loads is not None:
            self.loads.lost()
        return ran

    # ---- admission

    def load_first(self, sequence: Sequence, needs: list[int]) -> bool:
        """Move a sequence that could be admitted from the queue to ``Blocked``, and return True, if a KV tier
        loads blocks that the pool does not have. ``needs``: see ``Loads.block``."""
        if self.loads is None or not self.loads.block(sequence, needs):
            return False
        self.waiting.remove(sequence)
        sequence.move(Blocked())
        return True

    def lookup(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Return (hashes, tokens of the cached prefix) over all known ids. Extends the sequence's hash chain;
        the caches stay unchanged."""
        hashes = self.hashes(sequence, len(sequence.tokens))
        limit = sequence.may_skip()
        return hashes, self.caches.hit(hashes, limit) if hashes and limit else 0

    def admit(
        self,
        sequence: Sequence,
        hashes: list[bytes],
        num_hit: int,
        end: int,
        marks: SnapshotMarks | None = None,
    ) -> tuple[Running, list[SlotUpdate]]:
        """Move a waiting sequence into a slot, with the blocks of the cache hit and new blocks up to position
        ``end``.

        ``hashes``, ``num_hit``: from ``lookup``. ``marks``: from ``marks``. Return the running state and the
        slot updates, which the caller puts into the plan. A sender's transfer starts. The caller must have
        checked for a free slot and enough free blocks.
        """
        self.waiting.start(sequence)
        slot, gen = self.slots.take()
        known = len(sequence.tokens)
        run = Running(slot=slot, gen=gen, known=known, marks=marks)
        ops: list[SlotUpdate] = [
            sequence.alloc(run, num_hit),
            *self.caches.acquire(slot, hashes, num_hit, end),
        ]
        sequence.move(run)
        self.running.add(sequence)
        self._count_admission(sequence, known, num_hit)
        self._enter(sequence, run, num_hit, end)
        self.media.enter(sequence, num_hit)
        if sequence.transfer is not None:
            self.columns.limit[slot] = known + 1  # the sequence leaves with the first token
            self.transfers.admitted(sequence, slot, num_hit, hashes, self.kv.block_size)
        return run, ops

    def adopt(self, sequence: Sequence, tables: FetchedTables) -> Running:
        """Move a waiting sequence into a slot, with the blocks of the received KV. Return the running state.

        The slot updates go into ``ops`` for the next plan. The caller must have checked for a free slot.
        """
        self.waiting.start(sequence)
        slot, gen = self.slots.take()
        known = len(sequence.tokens) - 1  # the caches have no entry for the last token
        hashes = self.hashes(sequence, known)
        marks = self.marks(sequence, hashes, known)
        run = Running(slot=slot, gen=gen, known=known, marks=marks)
        sequence.move(run)
        self.running.add(sequence)
        self._enter(sequence, run, known, tables.reach)
        self.ops += [sequence.alloc(run, known), *self.caches.adopt(tables.number, slot)]
        return run

    def guaranteed(self, sequence: Sequence) -> bool:
        """Return True if ``sequence`` and all protected running sequences fit at full length side by side."""
        lengths = [other.limit for other in self.running if other.protected]
        return self.caches.guaranteed([*lengths, sequence.limit])

    # ---- prefix sharing

    def hashes(self, sequence: Sequence, upto: int) -> list[bytes]:
        """Return the hashes of the blocks below ``upto`` that ``sequence`` may share; [] if nothing is
        shared.

        The result is the sequence's own growing chain: do not change the list. The list may reach further
        than ``upto``, but never further than the known ids: drafts computed after the last token of an ended
        sequence do not belong to the sequence.
        """
        caching = self.kv.enable_prefix_caching
        if not caching and not self.requests[sequence.request].shared:
            return []
        upto = min(upto, len(sequence.tokens) if caching else sequence.num_prompt)
        # A running sequence keeps its blocks of old weights, and so its chain: see ``use_weights``.
        stale = sequence.weights != self.weights and not isinstance(sequence.state, Running)
        if sequence.chain is None or stale:
            self._begin_chain(sequence)
        assert sequence.chain is not None
        return sequence.chain.grow(sequence.tokens, upto)

    def _begin_chain(self, sequence: Sequence) -> None:
        """Begin the chain of hashes of ``sequence``, under the name of the weights in use."""
        names = sequence.salt, sequence.adapter, self.weights
        sequence.weights = self.weights
        shared = self.kv.enable_prefix_caching
        root = salted_root(*names) if shared else request_root(sequence.request, *names)
        keys = media_keys(sequence.media, self.kv.block_size)
        sequence.chain = HashChain(root, self.kv.block_size, keys)

    def use_weights(self, name: bytes) -> None:
        """Name the prefixes of sequences that begin, or begin again, by ``name``. No step may be in flight.

        INVARIANT: a block has a hash of a chain only if the chain's weights have computed all KV of the block
        and of the blocks before. From now on a running sequence fills blocks behind KV of the old weights.
        These blocks get hashes that no other sequence has.
        """
        for sequence in self.running:
            run = sequence.state
            assert isinstance(run, Running)
            if sequence.chain is None:  # blocks may become shareable later
                self._begin_chain(sequence)
            assert sequence.chain is not None
            computed = int(self.columns.num_computed[run.slot])
            mark = sequence.id.to_bytes(16, "little", signed=True) + computed.to_bytes(8, "little") + name
            sequence.chain = sequence.chain.diverged(sequence.tokens, computed, mark)
            sequence.weights = MIXED
        self.media.cache.forget_all()  # embeddings of the old tower
        self.weights = name

    def insert(self, sequence: Sequence, slot: int, committed: int) -> None:
        """Insert the full blocks among the first ``committed`` positions into the prefix cache."""
        hashes = self.hashes(sequence, committed)
        if hashes:
            self.caches.insert(slot, committed, hashes, sequence)

    def prompt_computed(self, sequence: Sequence) -> None:
        """Mark the prompt of ``sequence`` as computed and enqueue the waiting parallel samples of the prompt.
        Idempotent."""
        request = self.requests[sequence.request]
        if request.prompt_computed:
            return
        request.prompt_computed = True
        for member in request.members.values():
            if isinstance(member.state, BlockedOnFirstSample):
                self._enqueue(member)

    # ---- transfers

    def received(self, sequence: Sequence, tables: FetchedTables, token: int) -> None:
        """Append the first output token ``token`` and enqueue a sequence after the transfer: ``tables`` has
        the whole KV.

        Full blocks enter the prefix cache, and parallel samples of the prompt need not wait any more.
        """
        known = len(sequence.tokens)
        hashes = self.hashes(sequence, known)
        if hashes:
            self.caches.insert(tables.number, known, hashes, sequence)
        sequence.take(token)
        sequence.move(Waiting(tables))
        self.waiting.add(sequence)
        self.prompt_computed(sequence)

    def release_sender(self, key: TransferKey) -> None:
        """Release the slot and the blocks of a sender after the handoff. Does nothing if the sender has no
        slot any more.

        The receiver has all entries, so the state of the sender is no longer needed.
        """
        slot_and_step = self.transfers.skip_saving(key)
        if slot_and_step is not None:
            self.caches.release(*slot_and_step)
            self.slots.release(*slot_and_step)

    def save(self, step: int) -> list[SlotUpdate]:
        """Return slot updates of plan ``step`` to save the states of senders after the handoff; [] without
        such senders.

        The senders leave the slots with the plan, so the plan must be certain to run.
        """
        if not self.transfers.unsaved:
            return []
        ops, slots = self.transfers.save(step)
        for slot in slots:
            self.caches.release(slot, step)
            self.slots.release(slot, step)
        return ops

    # ---- snapshots

    def marks(self, sequence: Sequence, hashes: list[bytes], num_hit: int) -> SnapshotMarks | None:
        """Return the boundaries at which ``sequence``, admitted with a hit of ``num_hit``, saves snapshots;
        None for no snapshots."""
        return self.caches.marks(hashes, len(sequence.tokens), num_hit)

    def snapshots(self, step: int) -> list[SlotUpdate]:
        """Return slot updates of plan ``step`` that save the recurrent states of all slots at a boundary, and
        record the snapshots. The plan must be certain to run.

        The updates run before the rows of the plan. A slot is skipped while drafts are being verified,
        because the length is then unknown. A slot is also skipped if a later row has overwritten the wanted
        state.
        """
        if not self.caches.has_states:
            return []
        columns, slots = self.columns, self.order()
        # [running], the length of each slot once all planned steps are done
        length = columns.num_scheduled[slots]
        # The device still has the states after the last ``exact`` positions, so the boundary may lie a little
        # back.
        back = length % self.caches.unit
        due = (length - back > columns.snapshot[slots]) & (back < columns.exact[slots])
        # Drafts in flight: the number of accepted positions is unknown.
        for plan in self.in_flight:
            due &= ~np.isin(slots, plan.decode.slot[plan.decode.count > 1])
        ops: list[SlotUpdate] = []
        for slot, behind in zip(slots[due].tolist(), back[due].tolist(), strict=True):
            ops += self._snapshot(slot, behind, step)
        return ops

    # ---- steps

    @property
    def asks(self) -> bool:
        """True if the next plan has work other than rows."""
        return bool(self.ops or self.transfers.can_save or self.media.cache.asks)

    def excuse(self, now: float) -> bool:
        """Return True if a pin, an image transfer or a load before its deadline explains missing blocks."""
        reserved = self.loads is not None and self.loads.excuse(now)
        return reserved or self.pins.excuse(now) or self.images.excuse(now)

    def planned(self, sequence: Sequence) -> bool:
        """Return True if ``sequence`` runs in a slot that the ranks know: a frozen plan names the slot."""
        run = sequence.state
        return isinstance(run, Running) and bool(self.columns.last_step[run.slot] >= 0)

    def order(self) -> np.ndarray:
        """Return the slots of the running sequences in scheduling order, [running]. Cached until a slot
        changes."""
        if self._order is None:
            slots = [s.state.slot for s in self.running if isinstance(s.state, Running)]
            self._order = np.array(slots, np.intp)
        return self._order

    def steady(self) -> SteadyRows | None:
        """Return the decode rows of all running sequences, if a second plan in a row may have the same rows;
        else None."""
        if self.kv.drafts:
            return None
        slots, steady = self.order(), self._steady
        if steady is not None and steady.slots is slots and steady.left > 0:
            return steady
        # Making the columns costs more than one step saves: make columns only for repeated rows.
        repeated, self._last_order = self._last_order is slots, slots
        self._steady = SteadyRows.of(slots, self.columns, self.in_slot) if repeated else None
        return self._steady

    def unchanged(self) -> SteadyRows | None:
        """Return the last steady rows if no slot has changed since; else None."""
        steady = self._steady
        return steady if steady is not None and steady.slots is self._order else None

    def take_ops(self, step: int) -> list[SlotUpdate]:
        """Return and clear the slot updates without rows, then the image updates. Plan ``step`` is recorded
        as the last user of the slots."""
        ops, self.ops = self.ops, []
        for op in ops:
            if (slot := getattr(op, "slot", None)) is not None:
                self.columns.last_step[slot] = step
        return ops + self.media.take_ops(step)

    def launched(self, plan: StepPlan) -> None:
        """Record ``plan`` as in flight. For all rows, advance ``num_scheduled`` and set the last step, the
        drafts and the exact states of the slots."""
        segments = [plan.prefill, plan.decode]
        if self._steady is not None:
            if self._steady.launched(plan):
                segments.pop()
            elif plan.decode.rows:
                self._steady = None
        for segment in segments:
            if not segment.rows:
                continue
            self.columns.num_scheduled[segment.slot] += segment.count
            self.columns.last_step[segment.slot] = plan.step
            self.columns.drafts[segment.slot] = segment.next_k
        # A prefill row leaves only the state after the last position. A decode row leaves the state of each
        # position.
        if self.caches.has_states:
            self.columns.exact[plan.prefill.slot] = 1
            self.columns.exact[plan.decode.slot] = plan.decode.count
        self.in_flight.append(plan)

    def committed(self, step: int) -> None:
        """Remove the oldest plan from flight and free everything pending until the commit of ``step``."""
        self.in_flight.popleft()
        self.last_commit = step
        self.caches.committed(step)
        self.media.cache.committed(step)
        self.adapters.committed()
        self.slots.committed(step)

    # ----

    def _enqueue_if_ready(self, sequence: Sequence) -> None:
        """Enqueue a blocked sequence if no input is missing any more. Does nothing in any other state."""
        lacks_input = sequence.blocked or sequence.blocked_images or sequence.fetches
        if not isinstance(sequence.state, Blocked) or lacks_input or not self.adapters.take(sequence):
            return
        if not self._loads_first(sequence):
            self._enqueue(sequence)

    def _loads_first(self, sequence: Sequence) -> bool:
        """Return True if a sequence must wait for blocks of a KV tier."""
        return self.loads is not None and self.loads.block(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        """Enqueue a sequence, or mark the sequence as blocked if input is missing. The caller has checked
        that no first sample is awaited."""
        lacks_input = sequence.blocked or sequence.blocked_images or not self.adapters.take(sequence)
        if lacks_input or self._loads_first(sequence):
            sequence.move(Blocked())
        else:
            sequence.move(Waiting())
            self.waiting.add(sequence)

    def _enter(self, sequence: Sequence, run: Running, num_computed: int, end: int) -> None:
        """Record ``sequence`` in its slot. The block tables reach to position ``end`` or further."""
        self.columns.enter(sequence, run, num_computed, self.caches.reserved(end))
        self.in_slot[run.slot] = sequence
        self._order = None

    def _snapshot(self, slot: int, back: int, step: int) -> list[SlotUpdate]:
        """Save the state of ``slot`` as of ``back`` positions ago in plan ``step``. Return the slot updates.

        Return [] if no snapshot is wanted at the boundary, the snapshot exists, or no block is free.
        """
        sequence, columns = self.in_slot[slot], self.columns
        run = sequence.state
        boundary = int(columns.num_scheduled[slot]) - back
        if run.marks is None or not run.marks.wants(boundary, int(columns.snapshot[slot])):
            return []
        number = boundary // self.kv.block_size
        hashes = self.hashes(sequence, boundary)
        if len(hashes) < number:
            return []
        ops = self.caches.save(slot, hashes[number - 1], back, boundary < run.known, step)
        if ops is None:
            return []
        columns.snapshot[slot] = boundary
        if ops:
            columns.last_step[slot] = step
        return ops

    def _release(self, sequence: Sequence, run: Running) -> None:
        """Take the slot and the blocks from a running sequence. Both are free after the last plan with the
        slot.

        A sender with a state to hand off keeps slot and blocks until ``save`` or ``release_sender``. Waiting
        slot updates of the slot are dropped.
        """
        last_step = int(self.columns.last_step[run.slot])
        self.misses.left(sequence, int(self.columns.num_computed[run.slot]))
        self.running.remove(sequence)
        self.waiting.stop(sequence)
        self.media.leave(sequence)
        if sequence.transfer is None or self.transfers.leaves(sequence, last_step):
            self.caches.release(run.slot, last_step)
            self.slots.release(run.slot, last_step)
        self.ops = [op for op in self.ops if getattr(op, "slot", None) != run.slot]
        self.columns.gen[run.slot] = 0
        self.in_slot[run.slot] = None
        self._order = None

    def _share(self, request: LiveRequest) -> None:
        """Let the sequences of a prompt share blocks. Running sequences insert their computed blocks into the
        prefix cache. Idempotent."""
        if request.shared:
            return
        request.shared = True
        for member in request.members.values():
            if isinstance(member.state, Running):  # positions computed alone can be shared from now on
                slot = member.state.slot
                self.insert(member, slot, int(self.columns.num_computed[slot]))

    def _leave(self, sequence: Sequence) -> None:
        """Remove an ended sequence from its prompt. If the first sample ends, another member becomes the
        first sample, and is enqueued if the prompt is not computed."""
        request = self.requests[sequence.request]
        del request.members[sequence.id]
        if not request.members:
            del self.requests[sequence.request]
        elif request.first_sample is sequence:
            request.first_sample = next(iter(request.members.values()))
            if not request.prompt_computed and isinstance(request.first_sample.state, BlockedOnFirstSample):
                self._enqueue(request.first_sample)

    def _count_admission(self, sequence: Sequence, known: int, num_hit: int) -> None:
        """Count prefix queries and hits. At the first admission, also set ``num_cached``, count prompt tokens
        and explain the cache miss."""
        if sequence.num_cached < 0:
            sequence.num_cached = min(num_hit, sequence.num_prompt)
            self.counts.prompt_tokens += sequence.num_prompt
            self.misses.admitted(sequence, num_hit)
            if self.loads is not None:
                self.loads.explain(sequence, num_hit)
        if self.loads is not None:
            self.loads.admitted(sequence, num_hit)
        if sequence.chain is not None:
            self.counts.prefix_queries += known
            self.counts.prefix_hits += num_hit
