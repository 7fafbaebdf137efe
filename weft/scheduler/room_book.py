"""What a scheduler knows of the rooms of its sequences, and what they keep on hold.

A record lasts from the Submit until nobody outside can touch the sequence's blocks any more, which may be
long after the sequence has ended. Of a receiver only until the room has landed: from then on the blocks are
the sequence's own.

    sender      in a slot ──moved──> parting ──states are saved──> blocks on hold ──Landed, Freed──> gone
                     ╰──ends otherwise, is lost, or has no states──────^
    receiver    Awaiting ──blocks are reserved──> Fetching: blocks on hold ──Landed──> gone
                     ╰──ends──> gone                 ╰──ends──> blocks on hold ──Freed──> gone
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from weft.common.errors import Cancelled, ErrorInfo
from weft.kv.caches import Caches
from weft.kv.kinds import ids_of
from weft.scheduler.holds import Holds
from weft.scheduler.sequence import FetchedTables, Sequence
from weft.types.messages import LogprobColumns, TokenEvent
from weft.types.plan import Export, Op
from weft.types.rooms import (
    Admitted,
    Blocks,
    CancelRoom,
    FinishRoom,
    FirstToken,
    OfferRoom,
    RoomKey,
    RoomRequest,
)

FENCE_S = 60.0
"""Seconds after its deadline within which a room ends: as long does it excuse a lack of blocks."""


@dataclass(slots=True, eq=False)
class RoomRecord:
    """One room, as the scheduler knows it."""

    key: RoomKey
    sequence: Sequence
    length: int
    """Positions that go from one group to the other: what was known of the sequence when it came."""
    due: float = math.inf
    """When it is late; never before its first offer."""
    over: bool = False
    """Nothing is to be asked of it: it failed, or was cancelled, or it is up to the other side."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """(kind, block) on hold for it."""
    slot: int = -1
    """Of a sender: where its tables are; -1 before it has one, and when it has left it."""
    blocks: tuple[Blocks, ...] = ()
    """Of a sender that has left its slot: its tables, and the snapshots of its states, if they were saved."""
    exported: list[int] = field(default_factory=list)
    """Of a sender: for each kind, up to which entry of its table ranks were told."""
    unsaid: OfferRoom | None = None
    """Of a sender: an offer that is not made before the prompt is computed."""
    offer: Admitted | None = None
    """Of a receiver: what it was asked, until it answers, or ends."""
    needed: list[int] = field(default_factory=list)
    """Of a receiver that was told to come later: the blocks of each kind that it lacked."""
    hits: int = 0
    """Of a receiver: positions that were in its own cache."""


def why_cancelled(finish: str, error: ErrorInfo | None) -> ErrorInfo | None:
    """Return the error for the rooms of a sequence that ends with ``finish`` before they are done.

    None after an end that the front gets from this head (a stop, a limit, an error of the request): then the
    other group has no part in the sequence any more, and must not give it back.
    """
    if finish == "abort":
        return error or Cancelled("the client went away").info()
    return error if finish == "evicted" else None


def is_eviction(error: ErrorInfo | None) -> bool:
    """Return True if a sequence that is given back with ``error`` is to be computed again."""
    return error is None or error.blame != "client"


class RoomBook:
    """The records of all rooms of a scheduler. ``SchedulerState`` tells what becomes of sequences,
    ``SchedulerRooms`` what of rooms.
    """

    def __init__(self, caches: Caches, holds: Holds) -> None:
        self.now = -math.inf
        """The latest time that the scheduler was told."""
        self.decodes = False
        """Whether the group decodes what others have prefilled."""
        self.pulled = False
        """Whether senders offer what they have computed; else what they compute (--transfer-mode)."""
        self._caches = caches
        self._holds = holds
        self._records: dict[RoomKey, RoomRecord] = {}
        self._fetches = 0
        self._due = math.inf  # no record of a sequence that awaits its room is late before
        self.requests: list[RoomRequest] = []
        """What is asked of rooms, in order, and was not taken yet."""
        self.events: list[TokenEvent] = []
        """Ends of sequences that were given back, and were not told yet."""
        self.parting: dict[RoomKey, int] = {}
        """Senders that have moved, and keep their slot until their states are saved: the last plan of each
        that names it."""
        self.offers: dict[RoomKey, RoomRecord] = {}
        """Those that were asked, and have not answered."""
        self.later: dict[RoomKey, RoomRecord] = {}
        """Those that have answered that there is no room now. They answer again when there is."""
        self.evictions = 0

    def get(self, key: RoomKey) -> RoomRecord | None:
        return self._records.get(key)

    def of(self, sequence: Sequence) -> RoomRecord | None:
        """The record of a sequence's room, while there is one."""
        return None if sequence.room is None else self._records.get(sequence.room.key)

    def __len__(self) -> int:
        return len(self._records)

    # ---- what becomes of sequences

    def open(self, sequence: Sequence) -> None:
        """A sequence with a room has come."""
        assert sequence.room is not None
        key = sequence.room.key
        self._records[key] = RoomRecord(key, sequence, len(sequence.tokens))

    def admitted(self, sequence: Sequence, slot: int, num_hit: int, hashes: list[bytes], block: int) -> None:
        """A sender has a slot, and a prefix hit of ``num_hit``; ``hashes`` of blocks of ``block`` tokens."""
        record = self.of(sequence)
        if record is None:
            return
        self._begin(record)
        record.slot = slot
        record.exported = [0] * len(self._caches.kinds)
        known = b"".join(hashes[: record.length // block])
        offer = OfferRoom(key=record.key, num_prompt=record.length, num_cached=num_hit, hashes=known)
        if self.pulled:
            record.unsaid = offer
        else:
            self.requests.append(offer)

    def export(self, sequence: Sequence, start: int, end: int) -> list[Op]:
        """The op that goes with a sender's row over ``start`` .. end - 1, for which its tables are made."""
        record = self.of(sequence)
        if record is None:
            return []
        told = record.exported
        new = []
        for kind, blocks in enumerate(self._caches.table(record.slot, record.length)):
            skip = max(told[kind] - blocks.first, 0)
            new.append(Blocks(first=blocks.first + skip, ids=blocks.ids[4 * skip :]))
            told[kind] = max(told[kind], blocks.first + len(blocks.ids) // 4)
        return [Export(slot=record.slot, key=record.key, start=start, end=end, blocks=tuple(new))]

    def moved(self, sequence: Sequence, token: int, logprobs: LogprobColumns | None) -> None:
        """A sender's prompt is computed, and ``token`` is its first."""
        record = self.of(sequence)
        if record is None:
            return
        packed = b"" if logprobs is None else msgspec.msgpack.encode(logprobs)
        first = FirstToken(choice=sequence.choice, token=token, logprobs=packed)
        if record.unsaid is not None and not record.over:
            self.requests.append(record.unsaid)
        self.requests.append(FinishRoom(key=record.key, first=first))
        if self._caches.recurrent and not record.over:
            self.parting[record.key] = -1
        record.over = True

    def leaves(self, sequence: Sequence, last_step: int) -> bool:
        """A sequence is to leave its slot, which ``last_step`` was the last to name. Its blocks go on hold.

        False when the slot must stay as it is, for ``save``.
        """
        record = self.of(sequence)
        if record is None:
            return True
        if record.key in self.parting:
            self.parting[record.key] = last_step
            return False
        self._keep(record, ())
        return True

    def ended(self, sequence: Sequence, finish: str, error: ErrorInfo | None) -> None:
        """A sequence has ended, and left what it had."""
        record = self.of(sequence)
        if record is None:
            return
        if not record.over:
            record.over = True
            self.requests.append(CancelRoom(key=record.key, error=why_cancelled(finish, error)))
        self.answered(record)
        if not record.held and record.key not in self.parting:
            del self._records[record.key]

    def evicted(self, sequence: Sequence, error: ErrorInfo | None = None) -> None:
        """A sequence was given back to its front, which is to hear of it. ``error``: of its room.

        Counts an eviction, unless the sequence has ended at the other end, or its client has left.
        """
        self.evictions += is_eviction(error)
        self.events.append(
            TokenEvent(
                sequence=sequence.id,
                num_cached=max(sequence.num_cached, 0),
                finish="evicted",
                error=error,
                position=sequence.position,
            )
        )

    def given_back(self) -> list[TokenEvent]:
        """What there is to tell, once."""
        events, self.events = self.events, []
        return events

    def untold(self, sequence: int) -> list[TokenEvent]:
        """Takes what was not told yet of the sequence of this id."""
        found = [event for event in self.events if event.sequence == sequence]
        if found:
            self.events = [event for event in self.events if event.sequence != sequence]
        return found

    # ---- a sender's states

    @property
    def can_save(self) -> bool:
        """Whether the next plan can save the states of a sender."""
        return bool(self.parting) and self._caches.can_take()

    def save(self, step: int) -> tuple[list[Op], list[int]]:
        """(ops, slots): plan ``step`` saves the states of senders that have moved, which leave these slots
        with it.
        """
        ops = list[Op]()
        slots = list[int]()
        while self.can_save:
            key = next(iter(self.parting))
            record = self._records[key]
            slot = record.slot
            saved, snapshots = self._caches.take(slot, step)
            end = record.length
            ops += saved
            ops.append(Export(slot=slot, key=key, start=end, end=end, blocks=snapshots, states=True))
            del self.parting[key]
            self._keep(record, snapshots)
            slots.append(slot)
        return ops, slots

    def part(self, key: RoomKey) -> tuple[int, int] | None:
        """(slot, last step): a sender leaves its slot without its states. None if it does not keep one."""
        last_step = self.parting.pop(key, None)
        if last_step is None:
            return None
        record = self._records[key]
        slot = record.slot
        self._keep(record, ())
        return slot, last_step

    # ---- what becomes of rooms

    def tables(self, key: RoomKey) -> tuple[Blocks, ...]:
        """A sender's own, as far as they are there; none of an unknown room, or before it has a slot."""
        record = self._records.get(key)
        if record is None:
            return ()
        return record.blocks if record.slot < 0 else self._caches.table(record.slot, record.length)

    def reserve(
        self, record: RoomRecord, hashes: list[bytes], hits: int, reach: int, sent_blocks: list[int]
    ) -> tuple[FetchedTables, tuple[Blocks, ...]]:
        """Blocks for a receiver's cache, up to ``reach``; those that the sender writes to are on hold."""
        self._fetches += 1
        number = -1 - self._fetches
        blocks = self._caches.fetch(number, hashes, hits, record.length, reach, sent_blocks)
        record.hits = hits
        self.answered(record)
        self._hold(record, blocks)
        return FetchedTables(number, reach), blocks

    def wanted(self, record: RoomRecord, offer: Admitted) -> None:
        """A receiver's room was offered, for the first time or again."""
        if record.due == math.inf:
            self._begin(record)
            self._due = min(self._due, record.due)
        record.offer = offer
        self.offers[record.key] = record

    def answered(self, record: RoomRecord) -> None:
        """Notes that the room's offer, if it has one, needs no other answer. Idempotent."""
        record.offer = None
        self.offers.pop(record.key, None)
        self.later.pop(record.key, None)

    def close(self, record: RoomRecord) -> None:
        """Nobody outside can touch the blocks of the room any more."""
        self._holds.unhold_all(record.held)
        record.held = []
        self.answered(record)
        del self._records[record.key]

    def late(self, now: float) -> list[Sequence]:
        """Receivers whose rooms are late. Cheap while there is none."""
        if now < self._due:
            return []
        waiting = [r for r in self._records.values() if r.sequence.fetches and not r.over]
        self._due = min((r.due for r in waiting if r.due > now), default=math.inf)
        return [r.sequence for r in waiting if r.due <= now]

    @property
    def awaited(self) -> bool:
        """Whether there are receivers whose rooms have not landed."""
        return any(r.sequence.fetches and not r.over for r in self._records.values())

    # ----

    def _begin(self, record: RoomRecord) -> None:
        assert record.sequence.room is not None
        record.due = self.now + record.sequence.room.seconds

    def _keep(self, record: RoomRecord, snapshots: tuple[Blocks, ...]) -> None:
        """A sender leaves its slot: what its room reads goes on hold."""
        tables = self._caches.table(record.slot, record.length)
        record.slot = -1
        if snapshots:
            tables = tuple(s if s.ids else t for s, t in zip(snapshots, tables, strict=True))
        record.blocks = tables
        self._hold(record, tables)

    def _hold(self, record: RoomRecord, blocks: tuple[Blocks, ...]) -> None:
        for kind, each in enumerate(blocks):
            for block in ids_of(each):
                self._holds.hold(kind, block, record.due + FENCE_S)
                record.held.append((kind, block))
