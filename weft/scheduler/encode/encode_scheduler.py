"""The scheduler of an encode group. Replaces ``weft.scheduler.Scheduler``, and is as pure.

A Submit has images with pixels and no prompt. Each image has a transfer for the embedding. The transfers are
offered at once. Plans have slot updates and no rows. A sequence ends with

    moved     all embeddings have been received
    evicted   a transfer failed, with the error of the transfer, or the group lost ranks: the router retries
    error     an image of the sequence cannot be encoded
    abort     the API server has cancelled the sequence

See ``weft.scheduler.encode.book`` for the states of a transfer, and ``weft.scheduler.encode.encode_batch``
for the work of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from weft.common.errors import (
    Cancelled,
    EngineDead,
    ErrorInfo,
    ImageFailed,
    Overloaded,
    RanksLost,
    Unavailable,
)
from weft.config.resolved import MediaLimits
from weft.config.sections.all import SchedulerSection
from weft.kv.embeddings import EmbeddingCache
from weft.kv.prefix_log import PrefixLog
from weft.scheduler.encode.book import ItemBook, ItemSequence, ItemTransfer
from weft.scheduler.encode.encode_batch import EncodeBatch
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.slot_columns import SlotColumns
from weft.types.messages import EngineStats, Submit, TokenEvent
from weft.types.plan import StepPlan, StepResult, TokenMasks
from weft.types.transfer import (
    Blocks,
    CancelTransfer,
    FinishTransfer,
    OfferTransfer,
    TransferBound,
    TransferEvent,
    TransferFailed,
    TransferFreed,
    TransferKey,
    TransferReceived,
    TransferRequest,
)

MAX_IN_FLIGHT = 2


class EncodeScheduler:
    """The control core of one encode group. Has the methods of ``Scheduler`` called by an engine."""

    def __init__(self, limits: MediaLimits, section: SchedulerSection, most_pixels: int) -> None:
        """``most_pixels``: maximum bytes of pixels of all sequences; a single sequence may have more."""
        self._limits, self._section, self._most_pixels = limits, section, most_pixels
        self.cache = EmbeddingCache(
            limits.blocks, limits.host_blocks, row_bytes=limits.row_bytes, block_rows=limits.block_rows
        )
        self._book = ItemBook(limits)
        self._columns = SlotColumns(0)
        self._requests: list[TransferRequest] = []
        self._events: list[TokenEvent] = []
        """Terminal events of sequences, not reported yet."""
        self._step = self._steps = 0
        self._built: tuple[PlanBuilder, EncodeBatch | None] | None = None
        self._in_flight: deque[tuple[StepPlan, list[ItemTransfer]]] = deque()
        """Plans without a commit, with the transfers sent in each plan."""
        self._starved: ItemTransfer | None = None
        """The first bound transfer in order for which the pool was full; None without one."""
        self._may_send_alone = True
        """True if the next step may only send stored embeddings. False directly after such a step."""
        self._admitted: list[int] = []
        """Sequences with the first work in the last plan."""
        self._blocked = False
        """True if nothing can be planned until something changes."""
        self._has_ranks = True
        """False between ``lose`` and ``requeue_all``: no transfer is offered without ranks."""

    @property
    def embeddings(self) -> EncodeScheduler:
        """The handler of embedding transfers: the scheduler itself."""
        return self

    # ---- sequences

    def add(
        self, submit: Submit, now: float, blocked: bool = False, until: float | None = None
    ) -> list[TokenEvent]:
        """Accept images, queue the encoding and offer the transfers. Return [].

        Between ``lose`` and ``requeue_all``, the transfers are not offered yet: ``requeue_all`` offers the
        transfers. ``now``, ``blocked`` and ``until`` have no effect. Raises InvalidRequest or Overloaded
        before any change.
        """
        pixels = self._book.check(submit)
        live = len(self._book.live)
        full = live and self._book.pixels + pixels > self._most_pixels
        if full or live >= self._section.max_queued_requests:
            raise Overloaded(f"{live} sequences wait for their images already; try again later")
        sequence = self._book.add(submit)
        if self._has_ranks:
            self._offer(sequence)
        self._blocked = False
        return []

    def finish(self, sequence: int) -> list[TokenEvent]:
        """Abort a sequence, cancel the open transfers and return the terminal event. For an ended sequence,
        return the events not returned yet; [] if there are none."""
        found = self._book.live.get(sequence)
        if found is None:
            # Remove the event: a late event would end a later attempt with the same id.
            unreported = [event for event in self._events if event.sequence == sequence]
            self._events = [event for event in self._events if event.sequence != sequence]
            return unreported
        self._end(found, "abort", None, Cancelled("the client went away").info())
        # `_end` has appended the terminal event of the sequence.
        terminal, self._events = self._events[-1:], self._events[:-1]
        return terminal

    def arrived(self, sequence: int) -> None:
        """Do nothing: a sequence waits only for transfers."""

    def constrain(self, sequence: int, matcher: object, end_ids: Iterable[int]) -> list[TokenEvent]:
        """Return []: no sequence has a grammar."""
        return []

    def fail(self, sequence: int, error: ErrorInfo) -> list[TokenEvent]:
        """End a sequence with ``error``, unless unknown, and cancel the open transfers. Return and clear all
        unreported terminal events."""
        if (found := self._book.live.get(sequence)) is not None:
            self._end(found, "error", error, error)
        return self._take_events()

    def expire(self, now: float) -> list[TokenEvent]:
        """Return unreported events. The deadlines of transfers are checked by the engine's transfers."""
        return self._take_events()

    def lose(self) -> None:
        """Return all sequences to the router with the code "group_lost", after ranks were lost.

        New sequences wait until ``requeue_all``. New transfers are not offered, because offers would fail at
        once.
        """
        lost = RanksLost("processes of the group that encoded the images were lost").info()
        for sequence in list(self._book.live.values()):
            self._end(sequence, "evicted", lost, lost)
        self._has_ranks = False

    def requeue_all(self) -> list[TokenEvent]:
        """Restart after the group formed anew: end all sequences unless ``lose`` has done so, and offer the
        transfers of newer sequences. Return unreported terminal events.

        The ranks have no embeddings and no plan is in flight. Embeddings still read by a transfer keep the
        blocks.
        """
        self._built = None
        if self._has_ranks:
            self.lose()
        self._in_flight.clear()
        self.cache.clear()
        self._has_ranks, self._blocked = True, False
        for sequence in self._book.live.values():
            self._offer(sequence)
        return self._take_events()

    # ---- transfers

    def transfer(self, event: TransferEvent, now: float) -> list[TokenEvent]:
        """Handle a transfer event. Return and clear unreported terminal events. Events of unknown transfers
        are ignored.

        A sequence ends when all embeddings are received, or when a transfer fails.
        """
        transfer = self._book.get(event.key)
        if transfer is None:
            return self._take_events()
        self._blocked = False
        match event:
            case TransferBound(_, start):
                self._bound(transfer, start)
            case TransferReceived():
                self._received(transfer)
            case TransferFailed(_, error):
                self._failed(transfer, error)
            case TransferFreed():
                self._failed(transfer, Unavailable("the transfer has ended").info())
                self._close(transfer)
        return self._take_events()

    def transfer_requests(self) -> list[TransferRequest]:
        """Return and clear the requests to transfers, in order."""
        requests, self._requests = self._requests, []
        return requests

    def transfer_blocks(self, key: TransferKey) -> tuple[Blocks, ...]:
        """Return the blocks of the transfer's embedding once pinned; else an empty table."""
        transfer = self._book.get(key)
        held = None if transfer is None else transfer.held
        return (Blocks(first=0, ids=b"" if held is None else held.ids),)

    # ---- steps

    def has_work(self) -> bool:
        """Return True if there is a step to plan or to commit."""
        return bool(self._in_flight) or self._can_plan

    @property
    def _can_plan(self) -> bool:
        return self.cache.asks or (not self._blocked and self._book.waits)

    @property
    def blocked(self) -> bool:
        """True if nothing can be done before an external event."""
        return bool(self._book.live) and not self.has_work()

    @property
    def in_flight(self) -> int:
        """Number of plans without a commit."""
        return len(self._in_flight)

    @property
    def steps(self) -> int:
        """Number of committed steps."""
        return self._steps

    def build(self, now: float) -> PlanBuilder | None:
        """Return the next step for ``freeze``, or None if nothing can be done before a commit or an event.

        Evictions, pins and updates of the step apply to ``cache`` at once. Raises EngineDead when two steps
        are in flight, or when the last builder was not frozen.
        """
        builder = self._begin()
        batch = EncodeBatch(self._book, self.cache, self._limits, self._step)
        self._starved = batch.fill(self._starved, self._may_send_alone)
        self._may_send_alone = not batch.sends_alone
        # Nothing to send, encode or move: blocked until a commit, an event or a new sequence.
        if not self.cache.asks:
            self._blocked = True
            return None
        self._built = (builder, batch)
        return builder

    def idle(self) -> PlanBuilder:
        """Return an empty step. Raises EngineDead like ``build``."""
        builder = self._begin()
        self._built = (builder, None)
        return builder

    def freeze(self, builder: PlanBuilder) -> StepPlan:
        """Freeze ``builder`` into a plan with all waiting updates of ``cache``. The plan is in flight from
        now on.

        Raises EngineDead if ``builder`` is not the last builder.
        """
        if self._built is None or builder is not self._built[0]:
            raise EngineDead("only the step that was built last can be frozen")
        batch = self._built[1]
        plan = builder.freeze(self.cache.take_ops(self._step))
        sent = [] if batch is None else batch.sent
        # The first plan with work of a sequence counts as the admission.
        first: dict[int, ItemSequence] = {}
        for transfer in [*sent, *([] if batch is None else batch.encoded)]:
            if not transfer.sequence.admitted:
                transfer.sequence.admitted = True
                first[transfer.sequence.id] = transfer.sequence
        self._admitted = list(first)
        if batch is not None:
            self.cache.encoded += len(batch.encoded)
            self.cache.hits += sum(not transfer.owner for transfer in sent)
        self._in_flight.append((plan, sent))
        self._step += 1
        self._built = None
        return plan

    def admitted(self, plan: StepPlan) -> list[int]:
        """Return the ids of sequences with the first work in ``plan``, which must be the plan frozen last."""
        return self._admitted

    def masks(self, plan: StepPlan) -> TokenMasks:
        """Raise EngineDead: no plan of an encode group is constrained."""
        raise EngineDead("a group that encodes images samples no tokens")

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Commit the oldest plan in flight, and request the end of the transfers sent in the plan. Return
        unreported terminal events. Raises EngineDead for any other plan."""
        if not self._in_flight or self._in_flight[0][0] is not plan or result.step != plan.step:
            raise EngineDead(f"step {result.step} is not the oldest step in flight")
        _, sent = self._in_flight.popleft()
        self.cache.committed(plan.step)
        # The step has run, so the embeddings are on the ranks and the transfers can finish.
        self._requests += [FinishTransfer(key=transfer.key) for transfer in sent if not transfer.over]
        self._steps += 1
        self._blocked = False
        return self._take_events()

    def observe(self, plan: StepPlan, seconds: float, uncaptured: bool = False) -> None:
        """Do nothing: the policy does not depend on step times."""

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """Return None: an encode group has no prefixes."""
        return None

    def stats(self) -> EngineStats:
        """Return counters and gauges. A sequence counts as waiting until all embeddings may be sent."""
        waiting = self._book.unsent
        cache = self.cache
        return EngineStats(
            steps=self._steps,
            running=len(self._book.live) - waiting,
            waiting=waiting,
            kv_usage=sum(len(held.blocks) for held in cache if held.pins) / max(cache.blocks, 1),
            free_blocks=(cache.available,),
            images_encoded=cache.encoded,
            image_hits=cache.hits,
            embedding_bytes=cache.nbytes,
        )

    # ----

    def _begin(self) -> PlanBuilder:
        """Return an empty, closed builder. Raises EngineDead if two steps are in flight, or if the last
        builder was not frozen."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise EngineDead(f"{MAX_IN_FLIGHT} steps are in flight already")
        if self._built is not None:
            raise EngineDead("a step was built and never frozen")
        return PlanBuilder(self._step, 0, self._columns).close()

    def _offer(self, sequence: ItemSequence) -> None:
        for transfer in sequence.transfers:
            self._requests.append(
                OfferTransfer(key=transfer.key, num_prompt=transfer.item.count, num_cached=0)
            )

    def _bound(self, transfer: ItemTransfer, start: int) -> None:
        """Mark the transfer as bound: the receiver has memory for the embedding. If the receiver has all
        rows, nothing is sent."""
        transfer.bound = True
        # `start` counts the rows that the receiver already has.
        if start >= transfer.item.count and not (transfer.over or transfer.sent):
            self._book.send(transfer)
            self._requests.append(FinishTransfer(key=transfer.key))

    def _received(self, transfer: ItemTransfer) -> None:
        """Close a received transfer and unpin the embedding. End the sequence with "moved" after the last
        transfer."""
        sequence = transfer.sequence
        self._close(transfer)
        if transfer.over or self._book.live.get(sequence.id) is not sequence:
            return
        sequence.left -= 1
        if not sequence.left:
            self._end(sequence, "moved", None, None)

    def _failed(self, transfer: ItemTransfer, error: ErrorInfo) -> None:
        """End the sequence of a failed transfer: "error" at the transfer that caused a failed encoding, else
        "evicted".

        If the image cannot be encoded, the embedding is dropped. Other sequences with the same image encode
        the image again, and fail by a separate attempt. A pinned embedding keeps the transfer registered.
        """
        self._book.fail(transfer)
        encoding_failed = error.code == ImageFailed.code
        if encoding_failed and transfer.held is not None:
            self.cache.drop(transfer.held)
        if transfer.held is None:
            self._book.close(transfer)
        if self._book.live.get(transfer.sequence.id) is transfer.sequence:
            # Only the transfer that caused the encoding reports the error; others are retried by the router.
            finish = "error" if encoding_failed and transfer.owner else "evicted"
            self._end(transfer.sequence, finish, error, error)

    def _close(self, transfer: ItemTransfer) -> None:
        """Close the transfer and unpin the embedding: nobody outside touches the embedding any more."""
        held, transfer.held = transfer.held, None
        self._book.close(transfer)
        if held is not None:
            self.cache.unpin(held)

    def _end(
        self, sequence: ItemSequence, finish: str, error: ErrorInfo | None, why: ErrorInfo | None
    ) -> None:
        """End a sequence with one terminal event (``finish``, ``error``) and cancel the open transfers with
        ``why``."""
        self._requests += [
            CancelTransfer(key=transfer.key, error=why) for transfer in self._book.end(sequence)
        ]
        self._events.append(TokenEvent(sequence=sequence.id, finish=finish, error=error))
        self._blocked = False

    def _take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events
