"""Rooms as the scheduler takes part in them: what it answers, and what becomes of sequences by what it hears.

A receiver's offer is answered when it comes, or once the leader of its request has its cache here (or has
ended): then siblings find its full blocks, and only the rest is sent again. One for which there are no blocks
is put off, and answered again as soon as there are: nobody waits until the sender asks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from weft.common.errors import ErrorInfo, InvalidRequest, RanksLost, Unavailable
from weft.common.log import get_logger
from weft.config.sections import TransferSection
from weft.scheduler.room_book import RoomRecord
from weft.scheduler.sequence import Awaiting, Fetching, Sequence
from weft.scheduler.state import SchedulerState
from weft.types.messages import LogprobColumns, Submit, TokenEvent, TransferStats
from weft.types.rooms import (
    MOST_SECONDS,
    Admitted,
    CancelRoom,
    FirstToken,
    PostponeRoom,
    RefuseRoom,
    ReserveRoom,
    RoomBound,
    RoomEvent,
    RoomFailed,
    RoomFreed,
    RoomKey,
    RoomLanded,
    RoomRequest,
    RoomWanted,
)

POSTPONE_S = 1.0
"""Seconds until a sender that was put off asks again, as what it was told since may be lost."""

_log = get_logger(__name__)
_logprobs: msgspec.msgpack.Decoder[LogprobColumns] = msgspec.msgpack.Decoder(LogprobColumns)


class SchedulerRooms:
    """Hears of rooms, and decides. ``state.rooms`` has the records."""

    def __init__(
        self,
        state: SchedulerState,
        transfer: TransferSection,
        vocab_size: int,
        starved: Callable[[], bool],
        promised: Callable[[], list[int]],
    ) -> None:
        """``starved``: whether a sequence of this group waits for blocks before it can be admitted;
        ``promised``: blocks of each kind that those will still take which were."""
        self._state = state
        self._book = state.rooms
        self._role = transfer.role
        self._watermark = transfer.decode_watermark
        self._vocab_size = vocab_size
        self._starved, self._promised = starved, promised
        self._next: RoomRecord | None = None
        """Of the receivers that were put off, the first by key: none behind it is let in. See ``_first``."""
        self._heard = False
        """Whether anything was heard of a room since offers were answered: then there may be other hits."""
        self._book.decodes = transfer.role == "decode"
        self._book.pulled = transfer.transfer_mode == "pull"

    def check(self, submit: Submit) -> None:
        """Raises InvalidRequest for a ticket that this group can have no part in."""
        ticket = submit.room
        if ticket is None:
            return
        if self._role != ("prefill" if ticket.sends else "decode"):
            part = "prefill for" if ticket.sends else "decode what was prefilled by"
            raise InvalidRequest(f"a group of role {self._role} does not {part} another group", param="room")
        if not (math.isfinite(ticket.seconds) and 0 < ticket.seconds <= MOST_SECONDS):
            raise InvalidRequest(f"seconds must be above 0 and at most {MOST_SECONDS:g}", param="room")
        if self._book.get(ticket.key) is not None:
            raise InvalidRequest("this room is known: a retry has an attempt of its own", param="room")

    def on(self, event: RoomEvent) -> None:
        """Hears ``event``. Those of unknown rooms are fine."""
        record = self._book.get(event.key)
        self._heard = True
        match event:
            case RoomWanted(key, offer):
                self._wanted(key, record, offer)
            case RoomLanded(_, first) if record is not None:
                self._landed(record, first)
            case RoomFailed(_, error) if record is not None:
                self._failed(record, error)
            case RoomFreed() if record is not None:
                self._failed(record, Unavailable("the room has ended").info())
                if self._book.get(event.key) is record:
                    self._book.close(record)
            case RoomBound():
                pass  # what is computed is exported whether somebody takes it or not

    def requests(self) -> list[RoomRequest]:
        """What is asked of rooms since the last call, in order."""
        book = self._book
        if book.offers:
            for record in list(book.offers.values()):
                self._answer(record)
        if book.later:
            self._look_again()
        self._heard = False
        if not book.requests:
            return []
        asked, book.requests = book.requests, []
        return asked

    def expire(self, now: float) -> None:
        """Gives back receivers whose rooms are late."""
        for sequence in self._book.late(now):
            self._state.evict(sequence, "the cache of a sequence did not come in time")

    def lose(self) -> None:
        """Ranks are lost: gives back those that run and have a room, or had one, or rely on what another
        group encoded, with the code "group_lost". Those that do not run have no part in it."""
        lost = RanksLost("processes of the group that computed the sequence were lost").info()
        for sequence in self._state.running.snapshot():
            if sequence.room is not None or sequence.relies:
                self._state.evict(sequence, lost.message, lost)

    def stats(self) -> TransferStats | None:
        """What the scheduler knows of it; None of a group that neither sends nor receives."""
        if self._role == "unified":
            return None
        states = [type(s.state) for s in self._state.live.values() if s.fetches]
        return TransferStats(
            awaiting=states.count(Awaiting),
            fetching=states.count(Fetching),
            blocks_on_hold=self._state.caches.num_on_hold(),
            evictions=self._book.evictions,
        )

    # ---- receiver

    def _wanted(self, key: RoomKey, record: RoomRecord | None, offer: Admitted) -> None:
        if record is None or record.over or not record.sequence.fetches:
            gone = Unavailable("the sequence has ended where it was to be decoded").info()
            self._book.requests.append(CancelRoom(key=key, error=gone))
        elif isinstance(record.sequence.state, Awaiting):
            self._book.wanted(record, offer)

    def _answer(self, record: RoomRecord) -> None:
        """Answers an offer, unless it is of a sibling whose leader comes first, or the sequence awaits its
        grammar."""
        offer = record.offer
        sequence = record.sequence
        request = self._state.requests[sequence.request]
        if offer is None or sequence.awaits:
            return
        if request.leader is not sequence and not request.prompt_computed:
            return
        del self._book.offers[record.key]
        self._book.requests.append(self._reserve(record, offer))

    def _look_again(self) -> None:
        """Answers those that were put off, in order, as far as there are blocks by now. Cheap while there
        are none, as it is called several times a step.
        """
        while (record := self._first()) is not None and (offer := record.offer) is not None:
            if not (self._heard or self._room_for(record.needed)):
                return
            answer = self._reserve(record, offer)
            if isinstance(answer, PostponeRoom):
                return
            self._book.requests.append(answer)

    def _reserve(self, record: RoomRecord, offer: Admitted) -> ReserveRoom | PostponeRoom | RefuseRoom:
        state = self._state
        caches = state.caches
        sequence = record.sequence
        length = record.length
        if offer.num_prompt != length or len(offer.dims.kinds) != len(caches.kinds):
            return self._refuse(record, "the sequence or the cache kinds of the two groups differ")
        reach = max(min(length + 1 + state.kv.drafts, sequence.limit), length + 1)
        if not caches.ever_fits(caches.fetch_needed([], 0, length, reach)):
            reach = length + 1  # then its first row has no drafts
            if not caches.ever_fits(caches.fetch_needed([], 0, length, reach)):
                why = "the sequence does not fit into the cache: raise --kv-cache-memory"
                return self._refuse(record, why)
        hashes = state.hashes(sequence, length)
        hits = caches.fetch_hit(hashes, length)
        record.needed = caches.fetch_needed(hashes, hits, length, reach)
        if self._is_behind(sequence) or not self._room_for(record.needed):
            return self._put_off(record)
        if sequence.chain is not None:
            state.counts.prefix_queries += length
            state.counts.prefix_hits += hits
        sent_blocks = [kind.block_size for kind in offer.dims.kinds]
        tables, blocks = self._book.reserve(record, hashes, hits, reach, sent_blocks)
        sequence.move(Fetching(tables))
        return ReserveRoom(key=record.key, start=hits, blocks=blocks)

    def _refuse(self, record: RoomRecord, why: str) -> RefuseRoom:
        self._book.answered(record)
        return RefuseRoom(key=record.key, error=Unavailable(why).info())

    def _put_off(self, record: RoomRecord) -> PostponeRoom:
        first = self._first()
        self._book.later[record.key] = record
        if first is None or record.sequence.key < first.sequence.key:
            self._next = record
        return PostponeRoom(key=record.key, seconds=POSTPONE_S)

    def _first(self) -> RoomRecord | None:
        """Of those that were put off, and still wait, the first by key."""
        later = self._book.later
        if self._next is None or later.get(self._next.key) is not self._next:
            self._next = min(later.values(), key=lambda record: record.sequence.key, default=None)
        return self._next

    def _is_behind(self, sequence: Sequence) -> bool:
        """Whether another one comes first, and was put off."""
        first = self._first()
        return first is not None and first.sequence.key < sequence.key

    def _room_for(self, needed: list[int]) -> bool:
        """Whether there are so many blocks beside those left to running sequences, and to those before it."""
        state = self._state
        if self._starved() and state.waiting:
            return False
        alone = not state.running and not any(s.tables for s in state.live.values())
        needed = [n + p for n, p in zip(needed, self._promised(), strict=True)]
        return state.caches.fits(needed, spare=0.0 if alone else self._watermark)

    def _landed(self, record: RoomRecord, first: tuple[FirstToken, ...]) -> None:
        sequence = record.sequence
        state = self._state
        state.part(record.key)
        self._book.close(record)
        tables = sequence.tables
        if not isinstance(sequence.state, Fetching) or tables is None:
            return  # it sends, or has ended
        found = next((f for f in first if f.choice == sequence.choice and f.token < self._vocab_size), None)
        if found is None:
            _log.warning("a room brought no first token of its sequence")
            state.evict(sequence, "the first token of a sequence was lost on its way")
            return
        sequence.num_cached = min(record.hits, sequence.num_prompt)
        state.landed(sequence, tables, found.token)
        finish, stop_id = sequence.ending() or (None, None)
        error = sequence.constraint.failure if sequence.constraint is not None else None
        if finish is not None:
            state.end(sequence, finish, error)
        self._book.events.append(
            TokenEvent(
                sequence=sequence.id,
                token_ids=() if error is not None else (found.token,),
                logprobs=None if error is not None else _unpacked(found),
                num_cached=sequence.num_cached,
                finish=finish,
                stop_id=stop_id,
                error=error,
                position=sequence.num_output - 1,
            )
        )

    # ---- both

    def _failed(self, record: RoomRecord, error: ErrorInfo) -> None:
        """Its sequence, unless it has left before, goes back to its front. What it holds stays on hold."""
        state = self._state
        sequence = record.sequence
        record.over = True
        state.part(record.key)
        if state.live.get(sequence.id) is sequence:
            state.evict(sequence, "the room of the sequence failed", error)


def _unpacked(first: FirstToken) -> LogprobColumns | None:
    if not first.logprobs:
        return None
    try:
        return _logprobs.decode(first.logprobs)
    except (msgspec.DecodeError, ValueError, UnicodeDecodeError):
        _log.warning("the logprobs of a sequence's first token cannot be read")
        return None
