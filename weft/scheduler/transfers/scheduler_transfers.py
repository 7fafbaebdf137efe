"""KV transfers in the scheduler: answers to offers, and effects of transfer events on sequences.

The receiver answers an offer at once. A parallel sample waits until the first sample has received the KV (or
has ended): full blocks are then found in the cache, and only the rest is sent. If blocks are missing, the
offer is postponed and answered as soon as blocks are free, without another offer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from weft.common.errors import ErrorInfo, InvalidRequest, RanksLost, Unavailable
from weft.common.log import get_logger
from weft.config.sections.all import TransferSection
from weft.scheduler.sequence import Blocked, Fetching, Sequence
from weft.scheduler.state import SchedulerState
from weft.scheduler.transfer_book import TransferRecord
from weft.types.messages import LogprobColumns, Submit, TokenEvent, TransferStats
from weft.types.transfer import (
    MOST_SECONDS,
    Admitted,
    CancelTransfer,
    FirstToken,
    PostponeTransfer,
    RefuseTransfer,
    ReserveTransfer,
    TransferBound,
    TransferEvent,
    TransferFailed,
    TransferFreed,
    TransferKey,
    TransferReceived,
    TransferRequest,
    TransferWanted,
)

POSTPONE_S = 1.0
"""Seconds after which a postponed sender offers again, in case an answer was lost."""

_log = get_logger(__name__)
_logprobs: msgspec.msgpack.Decoder[LogprobColumns] = msgspec.msgpack.Decoder(LogprobColumns)


class SchedulerTransfers:
    """Handles transfer events and decides the answers. ``state.transfers`` has the records."""

    def __init__(
        self,
        state: SchedulerState,
        transfer: TransferSection,
        vocab_size: int,
        starved: Callable[[], bool],
        promised: Callable[[], list[int]],
    ) -> None:
        """Create the handler, and set the transfer mode in ``state.transfers``.

        ``starved``: returns True if a sequence of the group lacks blocks for admission. ``promised``: returns
        the blocks of each KV cache group still to be taken by prefills in progress.
        """
        self._state = state
        self._book = state.transfers
        self._role = transfer.role
        self._watermark = transfer.decode_watermark
        self._vocab_size = vocab_size
        self._starved, self._promised = starved, promised
        self._next: TransferRecord | None = None
        """The first postponed receiver by key; no later receiver gets blocks. Cache of ``_first``."""
        self._heard = False
        """True if an event arrived since the last answers: cache hits may have changed."""
        self._book.decodes = transfer.role == "decode"
        self._book.pulled = transfer.transfer_mode == "pull"

    def check(self, submit: Submit) -> None:
        """Raise InvalidRequest if this group cannot take part with the transfer parameters."""
        parameters = submit.transfer
        if parameters is None:
            return
        if self._role != ("prefill" if parameters.sends else "decode"):
            part = "prefill for" if parameters.sends else "decode what was prefilled by"
            raise InvalidRequest(
                f"a group of role {self._role} does not {part} another group", param="transfer"
            )
        if not (math.isfinite(parameters.seconds) and 0 < parameters.seconds <= MOST_SECONDS):
            raise InvalidRequest(f"seconds must be above 0 and at most {MOST_SECONDS:g}", param="transfer")
        if self._book.get(parameters.key) is not None:
            raise InvalidRequest(
                "this transfer exists already: a retry needs a new attempt number", param="transfer"
            )

    def on(self, event: TransferEvent) -> None:
        """Handle ``event``; client events go into ``state.transfers.events``. Events of unknown transfers are
        ignored, but an unknown offer is cancelled."""
        record = self._book.get(event.key)
        self._heard = True
        match event:
            case TransferWanted(key, offer):
                self._wanted(key, record, offer)
            case TransferReceived(_, first) if record is not None:
                self._received(record, first)
            case TransferFailed(_, error) if record is not None:
                self._failed(record, error)
            case TransferFreed() if record is not None:
                self._failed(record, Unavailable("the transfer has ended").info())
                if self._book.get(event.key) is record:
                    self._book.close(record)
            case TransferBound():
                pass  # computed entries are exported whether or not the receiver is known

    def requests(self) -> list[TransferRequest]:
        """Answer open offers as far as possible. Return and clear all requests to transfers, in order."""
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
        """Return receivers with late transfers to the router."""
        for sequence in self._book.late(now):
            self._state.return_to_router(sequence, "the KV cache of a sequence did not arrive in time")

    def lose(self) -> None:
        """Return running sequences to the router after ranks were lost, with the code "group_lost".

        Applies to sequences with a transfer or with images from another group. Waiting sequences are not
        affected.
        """
        lost = RanksLost("processes of the group that computed the sequence were lost").info()
        for sequence in self._state.running.snapshot():
            if sequence.transfer is not None or sequence.relies:
                self._state.return_to_router(sequence, lost.message, lost)

    def stats(self) -> TransferStats | None:
        """Return the transfer statistics of the scheduler; None for a group without transfers."""
        if self._role == "unified":
            return None
        states = [type(s.state) for s in self._state.live.values() if s.fetches]
        return TransferStats(
            blocked=states.count(Blocked),
            fetching=states.count(Fetching),
            pinned_blocks=self._state.caches.num_pinned(),
            returns=self._book.returns,
        )

    # ---- receiver

    def _wanted(self, key: TransferKey, record: TransferRecord | None, offer: Admitted) -> None:
        """Store the offer of a blocked receiver. Cancel the offer if the sequence has ended; ignore any other
        offer."""
        if record is None or record.over or not record.sequence.fetches:
            gone = Unavailable("the sequence has ended in the decode group").info()
            self._book.requests.append(CancelTransfer(key=key, error=gone))
        elif isinstance(record.sequence.state, Blocked):
            self._book.wanted(record, offer)

    def _answer(self, record: TransferRecord) -> None:
        """Answer an offer, unless the sequence waits for its first sample, a grammar or an adapter. The
        answer goes into ``requests``.

        The sequence takes its adapter's place only now: the sender has a place. Sequences without an offer
        could otherwise hold all places here, and wait for places of the sender that sequences with an offer
        hold.
        """
        offer = record.offer
        sequence = record.sequence
        request = self._state.requests[sequence.request]
        if offer is None or sequence.blocked:
            return
        if request.first_sample is not sequence and not request.prompt_computed:
            return
        if not self._state.adapters.take(sequence):
            return
        del self._book.offers[record.key]
        self._book.requests.append(self._reserve(record, offer))

    def _look_again(self) -> None:
        """Answer postponed offers in order, as far as blocks are free. Called several times per step, so must
        be cheap."""
        while (record := self._first()) is not None and (offer := record.offer) is not None:
            if not (self._heard or self._room_for(record.needed)):
                return
            answer = self._reserve(record, offer)
            if isinstance(answer, PostponeTransfer):
                return
            self._book.requests.append(answer)

    def _reserve(
        self, record: TransferRecord, offer: Admitted
    ) -> ReserveTransfer | PostponeTransfer | RefuseTransfer:
        """Return the answer to ``offer``: reserve if blocks are free, postpone if not, refuse what can never
        fit.

        With a reservation, the sequence moves to Fetching.
        """
        state = self._state
        caches = state.caches
        sequence = record.sequence
        length = record.length
        if offer.num_prompt != length or len(offer.dims.kinds) != len(caches.kinds):
            return self._refuse(record, "the sequence or the KV cache groups of the two sides differ")
        # reach: the received positions, the first decode row and its drafts.
        reach = max(min(length + 1 + state.kv.drafts, sequence.limit), length + 1)
        if not caches.ever_fits(caches.fetch_needed([], 0, length, reach)):
            reach = length + 1  # without drafts in the first row
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
        return ReserveTransfer(key=record.key, start=hits, blocks=blocks)

    def _refuse(self, record: TransferRecord, why: str) -> RefuseTransfer:
        self._book.answered(record)
        return RefuseTransfer(key=record.key, error=Unavailable(why).info())

    def _put_off(self, record: TransferRecord) -> PostponeTransfer:
        """Postpone a receiver: answered again when blocks are free. Return the answer."""
        first = self._first()
        self._book.later[record.key] = record
        if first is None or record.sequence.key < first.sequence.key:
            self._next = record
        return PostponeTransfer(key=record.key, seconds=POSTPONE_S)

    def _first(self) -> TransferRecord | None:
        """Return the first postponed receiver by key; None without one."""
        later = self._book.later
        if self._next is None or later.get(self._next.key) is not self._next:
            self._next = min(later.values(), key=lambda record: record.sequence.key, default=None)
        return self._next

    def _is_behind(self, sequence: Sequence) -> bool:
        """Return True if an earlier sequence was postponed."""
        first = self._first()
        return first is not None and first.sequence.key < sequence.key

    def _room_for(self, needed: list[int]) -> bool:
        """Return True if ``needed`` blocks are free beside the blocks of running and of earlier sequences.

        With other sequences running, ``decode_watermark`` of each pool must stay free as well.
        """
        state = self._state
        if self._starved() and state.waiting:
            return False
        # Without other sequences, a watermark would only block the transfer.
        alone = not state.running and not any(s.tables for s in state.live.values())
        needed = [n + p for n, p in zip(needed, self._promised(), strict=True)]
        return state.caches.fits(needed, spare=0.0 if alone else self._watermark)

    def _received(self, record: TransferRecord, first: tuple[FirstToken, ...]) -> None:
        """Close an ended transfer. A receiver gets the first token and moves to the queue, or ends if
        complete; the event is stored.

        Without the first token, the sequence is returned to the router.
        """
        sequence = record.sequence
        state = self._state
        state.release_sender(record.key)
        self._book.close(record)
        tables = sequence.tables
        if not isinstance(sequence.state, Fetching) or tables is None:
            return  # a sender, or the sequence has ended
        found = next((f for f in first if f.choice == sequence.choice and f.token < self._vocab_size), None)
        if found is None:
            _log.warning("a transfer has no first token of its sequence")
            state.return_to_router(sequence, "the first token of a sequence was lost in the transfer")
            return
        # Hits at the receiver, not at the sender.
        sequence.num_cached = min(record.hits, sequence.num_prompt)
        state.received(sequence, tables, found.token)
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

    # ---- sender and receiver

    def _failed(self, record: TransferRecord, error: ErrorInfo) -> None:
        """End a failed transfer. Return the sequence to the router, if still live. The blocks stay pinned
        until freed."""
        state = self._state
        sequence = record.sequence
        record.over = True
        state.release_sender(record.key)
        if state.live.get(sequence.id) is sequence:
            state.return_to_router(sequence, "the KV transfer of the sequence failed", error)


def _unpacked(first: FirstToken) -> LogprobColumns | None:
    """Return the logprobs of the first token; None if absent or, with a log line, unreadable."""
    if not first.logprobs:
        return None
    try:
        return _logprobs.decode(first.logprobs)
    except (msgspec.DecodeError, ValueError, UnicodeDecodeError):
        _log.warning("the logprobs of a sequence's first token cannot be read")
        return None
