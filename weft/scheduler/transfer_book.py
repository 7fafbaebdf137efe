"""Transfer records of a scheduler, and the pins of transfers.

A record lasts from the Submit until nobody outside the group can touch the blocks of the sequence. For a
sender the end may come long after the end of the sequence. A receiver's record ends when the KV is received:
then the blocks belong to the sequence alone.

    sender      in a slot ──handed off──> unsaved ──states are saved──> blocks pinned ─received, Freed─> gone
                     ╰──other end, loss, or no states─────────────────────^
    receiver    Blocked ───blocks are reserved──> Fetching: blocks pinned ──received──> gone
                     ╰──ends──> gone                 ╰──ends──> blocks pinned ──Freed──> gone
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from weft.common.errors import Cancelled, ErrorInfo
from weft.kv.cache_groups import ids_of
from weft.kv.caches import Caches
from weft.scheduler.pins import Pins
from weft.scheduler.sequence import FetchedTables, Sequence
from weft.types.messages import LogprobColumns, TokenEvent
from weft.types.plan import Export, SlotUpdate
from weft.types.transfer import (
    Admitted,
    Blocks,
    CancelTransfer,
    FinishTransfer,
    FirstToken,
    OfferTransfer,
    TransferKey,
    TransferRequest,
)

FENCE_S = 60.0
"""Seconds after the deadline within which a transfer ends. Until then the pins excuse missing blocks."""


@dataclass(slots=True, eq=False)
class TransferRecord:
    """A transfer, from the view of the scheduler."""

    key: TransferKey
    sequence: Sequence
    length: int
    """Number of transferred positions: the known ids of the sequence at arrival."""
    due: float = math.inf
    """Deadline; infinite before the first offer."""
    over: bool = False
    """True if the transfer needs no further request: failed, cancelled, or in the hands of the other side."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """Pinned (KV cache group, block) pairs."""
    slot: int = -1
    """Sender: the slot with the block tables; -1 before admission and after release."""
    blocks: tuple[Blocks, ...] = ()
    """Sender without a slot: the block tables, with snapshots of saved states."""
    exported: list[int] = field(default_factory=list)
    """Sender: for each KV cache group, the number of table entries already reported to ranks."""
    delayed_offer: OfferTransfer | None = None
    """Sender: an offer to make after the prompt is computed; None otherwise."""
    offer: Admitted | None = None
    """Receiver: the open offer; None once answered."""
    needed: list[int] = field(default_factory=list)
    """Postponed receiver: the needed blocks of each KV cache group."""
    hits: int = 0
    """Receiver: number of positions found in the receiver's cache."""


def why_cancelled(finish: str, error: ErrorInfo | None) -> ErrorInfo | None:
    """Return the error for the open transfers of a sequence with the finish reason ``finish``.

    Return None if this engine reports the end to the router (a stop, a limit, an error of the request). The
    other group must then drop the sequence and not return the sequence to the router.
    """
    if finish == "abort":
        return error or Cancelled("the client went away").info()
    return error if finish == "evicted" else None


def is_return(error: ErrorInfo | None) -> bool:
    """Return True if a sequence returned with ``error`` must be computed again."""
    return error is None or error.blame != "client"


class TransferBook:
    """The records of all transfers of a scheduler.

    ``SchedulerState`` reports changes of sequences, ``SchedulerTransfers`` reports changes of transfers.
    """

    def __init__(self, caches: Caches, pins: Pins) -> None:
        self.now = -math.inf
        """The latest time passed to the scheduler."""
        self.decodes = False
        """True if the group decodes sequences that other groups prefill."""
        self.pulled = False
        """True if senders offer computed entries (pull); False if senders offer entries before computing
        (--transfer-mode)."""
        self._caches = caches
        self._pins = pins
        self._records: dict[TransferKey, TransferRecord] = {}
        self._fetches = 0
        self._due = math.inf  # earliest deadline of a receiver
        self.requests: list[TransferRequest] = []
        """Requests to transfers, in order, since the last read."""
        self.events: list[TokenEvent] = []
        """Client events not reported yet: first tokens of receivers, and ends of sequences returned to the
        router."""
        self.unsaved: dict[TransferKey, int] = {}
        """Senders after the handoff, with the slot kept until the states are saved -> last plan with the
        slot."""
        self.offers: dict[TransferKey, TransferRecord] = {}
        """Receivers with an open offer."""
        self.later: dict[TransferKey, TransferRecord] = {}
        """Postponed receivers: answered again when blocks are free."""
        self.returns = 0
        """Number of sequences returned to the router to be computed again."""

    def get(self, key: TransferKey) -> TransferRecord | None:
        return self._records.get(key)

    def of(self, sequence: Sequence) -> TransferRecord | None:
        """Return the record of the transfer of ``sequence``; None without a transfer or after its end."""
        return None if sequence.transfer is None else self._records.get(sequence.transfer.key)

    def __len__(self) -> int:
        return len(self._records)

    # ---- events of sequences

    def open(self, sequence: Sequence) -> None:
        """Create the record of a new sequence with a transfer."""
        assert sequence.transfer is not None
        key = sequence.transfer.key
        self._records[key] = TransferRecord(key, sequence, len(sequence.tokens))

    def admitted(self, sequence: Sequence, slot: int, num_hit: int, hashes: list[bytes], block: int) -> None:
        """Start the transfer of an admitted sender: set the deadline and make the offer, at once or after the
        prompt (pull mode). Does nothing for other sequences.

        ``num_hit``: cached positions. ``hashes``: of blocks of ``block`` tokens each.
        """
        record = self.of(sequence)
        if record is None:
            return
        self._begin(record)
        record.slot = slot
        record.exported = [0] * len(self._caches.kinds)
        known = b"".join(hashes[: record.length // block])
        offer = OfferTransfer(key=record.key, num_prompt=record.length, num_cached=num_hit, hashes=known)
        if self.pulled:
            record.delayed_offer = offer
        else:
            self.requests.append(offer)

    def export(self, sequence: Sequence, start: int, end: int) -> list[SlotUpdate]:
        """Return the slot update to export a sender's row over ``start`` .. end - 1; [] without a transfer.
        The tables must reach ``end``. The table entries of the update count as reported."""
        record = self.of(sequence)
        if record is None:
            return []
        exported = record.exported  # per KV cache group: table entries already reported
        new = []
        # Report only new table entries; ids are int32, so an entry has 4 bytes.
        for kind, blocks in enumerate(self._caches.table(record.slot, record.length)):
            skip = max(exported[kind] - blocks.first, 0)
            new.append(Blocks(first=blocks.first + skip, ids=blocks.ids[4 * skip :]))
            exported[kind] = max(exported[kind], blocks.first + len(blocks.ids) // 4)
        return [Export(slot=record.slot, key=record.key, start=start, end=end, blocks=tuple(new))]

    def handed_off(self, sequence: Sequence, token: int, logprobs: LogprobColumns | None) -> None:
        """Finish a sender: the prompt is computed and ``token`` is the first output token. Request the end of
        the transfer; in pull mode, make the offer first.

        With recurrent states, the slot stays in ``unsaved`` until ``save`` or ``skip_saving``.
        """
        record = self.of(sequence)
        if record is None:
            return
        packed = b"" if logprobs is None else msgspec.msgpack.encode(logprobs)
        first = FirstToken(choice=sequence.choice, token=token, logprobs=packed)
        if record.delayed_offer is not None and not record.over:
            self.requests.append(record.delayed_offer)
        self.requests.append(FinishTransfer(key=record.key, first=first))
        # The state is exported later, by ``save``: the slot must keep the state until then.
        if self._caches.recurrent and not record.over:
            self.unsaved[record.key] = -1
        record.over = True

    def leaves(self, sequence: Sequence, last_step: int) -> bool:
        """Pin the blocks of a sender at the loss of the slot. ``last_step``: the last plan with the slot.

        Return True if the caller must release slot and blocks; False if the slot must stay unchanged until
        ``save`` or ``skip_saving``.
        """
        record = self.of(sequence)
        if record is None:
            return True
        if record.key in self.unsaved:
            self.unsaved[record.key] = last_step
            return False
        self._keep(record, ())
        return True

    def ended(self, sequence: Sequence, finish: str, error: ErrorInfo | None) -> None:
        """End the transfer of an ended sequence: cancel if open, and drop the record if nothing is pinned."""
        record = self.of(sequence)
        if record is None:
            return
        if not record.over:
            record.over = True
            self.requests.append(CancelTransfer(key=record.key, error=why_cancelled(finish, error)))
        self.answered(record)
        if not record.held and record.key not in self.unsaved:
            del self._records[record.key]

    def returned(self, sequence: Sequence, error: ErrorInfo | None = None) -> None:
        """Add the terminal event of a sequence returned to the router. ``error``: why the transfer failed.

        Counts a return, unless the sequence ended at the other group or the client left.
        """
        self.returns += is_return(error)
        self.events.append(
            TokenEvent(
                sequence=sequence.id,
                num_cached=max(sequence.num_cached, 0),
                finish="evicted",
                error=error,
                position=sequence.position,
            )
        )

    def take_events(self) -> list[TokenEvent]:
        """Return and clear the client events not reported yet, see ``events``."""
        events, self.events = self.events, []
        return events

    def take_events_of(self, sequence: int) -> list[TokenEvent]:
        """Remove and return the unreported events of the sequence with the id ``sequence``."""
        unreported = [event for event in self.events if event.sequence == sequence]
        if unreported:
            self.events = [event for event in self.events if event.sequence != sequence]
        return unreported

    # ---- a sender's states

    @property
    def can_save(self) -> bool:
        """True if the next plan can save the state of a sender."""
        return bool(self.unsaved) and self._caches.can_take()

    def save(self, step: int) -> tuple[list[SlotUpdate], list[int]]:
        """Save the states of senders after the handoff with plan ``step``, as long as blocks are free. Pin
        the saved blocks.

        Return (slot updates, slots to be released by the caller). The senders leave the slots with the plan.
        """
        ops = list[SlotUpdate]()
        slots = list[int]()
        # One snapshot block per sender, as long as blocks are free.
        while self.can_save:
            key = next(iter(self.unsaved))
            record = self._records[key]
            slot = record.slot
            saved, snapshots = self._caches.take(slot, step)
            end = record.length
            ops += saved
            ops.append(Export(slot=slot, key=key, start=end, end=end, blocks=snapshots, states=True))
            del self.unsaved[key]
            self._keep(record, snapshots)
            slots.append(slot)
        return ops, slots

    def skip_saving(self, key: TransferKey) -> tuple[int, int] | None:
        """Take a sender's slot out of ``unsaved`` without saving states, and pin the blocks. Return (slot,
        last plan), to be released by the caller; None without such a slot."""
        last_step = self.unsaved.pop(key, None)
        if last_step is None:
            return None
        record = self._records[key]
        slot = record.slot
        self._keep(record, ())
        return slot, last_step

    # ---- events of transfers

    def tables(self, key: TransferKey) -> tuple[Blocks, ...]:
        """Return the allocated blocks of a sender; () for an unknown transfer or before admission."""
        record = self._records.get(key)
        if record is None:
            return ()
        return record.blocks if record.slot < 0 else self._caches.table(record.slot, record.length)

    def reserve(
        self, record: TransferRecord, hashes: list[bytes], hits: int, reach: int, sent_blocks: list[int]
    ) -> tuple[FetchedTables, tuple[Blocks, ...]]:
        """Reserve and pin the blocks of a receiver up to position ``reach``, and close the offer. Return
        (block tables without a slot, new blocks of each KV cache group to write).

        ``hits``: cached positions. ``sent_blocks``: block size of the sender, for each group. The caller has
        checked for free blocks.
        """
        self._fetches += 1
        number = -1 - self._fetches  # negative, and never -1: `NO_SLOT` of the planner
        blocks = self._caches.fetch(number, hashes, hits, record.length, reach, sent_blocks)
        record.hits = hits
        self.answered(record)
        self._pin(record, blocks)
        return FetchedTables(number, reach), blocks

    def wanted(self, record: TransferRecord, offer: Admitted) -> None:
        """Store the offer for a receiver. The first offer starts the deadline."""
        if record.due == math.inf:
            self._begin(record)
            self._due = min(self._due, record.due)
        record.offer = offer
        self.offers[record.key] = record

    def answered(self, record: TransferRecord) -> None:
        """Close the offer of the transfer, if any. Idempotent."""
        record.offer = None
        self.offers.pop(record.key, None)
        self.later.pop(record.key, None)

    def close(self, record: TransferRecord) -> None:
        """Unpin all blocks and drop the record: nobody outside can touch the blocks any more."""
        self._pins.unpin_all(record.held)
        record.held = []
        self.answered(record)
        del self._records[record.key]

    def late(self, now: float) -> list[Sequence]:
        """Return the receivers with an open transfer past the deadline. Cheap before the next deadline."""
        if now < self._due:
            return []
        waiting = [r for r in self._records.values() if r.sequence.fetches and not r.over]
        self._due = min((r.due for r in waiting if r.due > now), default=math.inf)
        return [r.sequence for r in waiting if r.due <= now]

    @property
    def any_blocked(self) -> bool:
        """True if a receiver still waits for KV."""
        return any(r.sequence.fetches and not r.over for r in self._records.values())

    # ----

    def _begin(self, record: TransferRecord) -> None:
        assert record.sequence.transfer is not None
        record.due = self.now + record.sequence.transfer.seconds

    def _keep(self, record: TransferRecord, snapshots: tuple[Blocks, ...]) -> None:
        """Pin the blocks of a sender and forget the slot. ``snapshots``: blocks of saved states, ()
        without."""
        tables = self._caches.table(record.slot, record.length)
        record.slot = -1
        if snapshots:
            # Groups with states have a snapshot block instead of a table.
            tables = tuple(s if s.ids else t for s, t in zip(snapshots, tables, strict=True))
        record.blocks = tables
        self._pin(record, tables)

    def _pin(self, record: TransferRecord, blocks: tuple[Blocks, ...]) -> None:
        """Pin the blocks for the record until some time after the deadline."""
        for kind, each in enumerate(blocks):
            for block in ids_of(each):
                self._pins.pin(kind, block, record.due + FENCE_S)
                record.held.append((kind, block))
