"""Transfers of one rank: a thread with ``Pushes`` and ``Arrivals`` over a transport.

    step loop      begin, computed (after each layer), expect, stop: queue a command and return
    this thread    plans, digests, writes; reads, checks, copies; blocks only in ``poll``
    tell(...)      reports for this rank's engine process, called on this thread: must not block

A fault of one transfer ends only the transfer; a fault of a peer ends only the peer's connection. If the
thread fails, all present and later transfers fail, but the thread still answers ``stop``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from weft.common.errors import EngineDead, ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.disagg.protocol import arrivals as a
from weft.disagg.protocol import pushes as p
from weft.disagg.protocol.coverage import Coverage
from weft.disagg.protocol.group_layout import placed
from weft.disagg.protocol.spans import Side, SpanPlan, arriving
from weft.disagg.protocol.transfer_events import RankReport, RankStopped
from weft.disagg.transport.base import PeerSizes, TakePending, Transport
from weft.types.transfer import Admitted, Blocks, Bound, GroupDims, Outcome, TransferKey, TransferMessageError

log = get_logger(__name__)

CONNECT_S = 10.0
_IDLE_S = 1.0
_END_S = 5.0


class TransferBegan(NamedTuple):
    """Start a transfer of a sender: computed parts may be pushed."""

    offer: Admitted
    bound: Bound
    blocks: tuple[Blocks, ...]
    """Blocks of the sequence in the group's own caches, so far."""
    num_cached: int


class Growing(NamedTuple):
    """The sequence of a sender's transfer has more blocks."""

    key: TransferKey
    blocks: tuple[Blocks, ...]


class Failing(NamedTuple):
    """The contents of a sender's transfer cannot be computed."""

    key: TransferKey
    error: ErrorInfo


class Expecting(NamedTuple):
    """Start a transfer of a receiver: bytes may arrive."""

    offer: Admitted
    bound: Bound


class TransferEnding(NamedTuple):
    """End one transfer."""

    key: TransferKey


class EndingAll(NamedTuple):
    """End all transfers."""

    carried_out: threading.Event


_Command = TransferBegan | Growing | Failing | Expecting | TransferEnding | EndingAll | p.Computed | None


class RankTransfer:
    """Transfers of one rank, in a separate thread. Created and closed by the rank's process; the methods
    are callable from any thread."""

    def __init__(
        self,
        rank: int,
        dims: GroupDims,
        transport: Transport,
        tell: Callable[[RankReport | RankStopped], None],
        *,
        start: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``dims``: layout of this rank's group. ``start=False``: no thread; the caller calls ``turn``."""
        self._rank, self._transport, self._tell = rank, transport, tell
        self.dims = dims
        self._clock = clock
        self.pushes = p.Pushes(
            [kind.layers for kind in dims.kinds],
            transport.digest,
            transport.write_bytes,
            transport.window_bytes,
            [number for number, kind in enumerate(dims.kinds) if kind.kind == "state"],
            limits=transport.limits if isinstance(transport, PeerSizes) else None,
        )
        self.arrivals = a.Arrivals()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._done = False
        self._stopping: list[TransferKey] = []
        """Stopped transfers with copies out of the caches under way."""
        self._all_stop: list[threading.Event] = []
        """Events to set once ``_stopping`` is empty."""
        self.failure: Exception | None = None
        """Error that ended all transfers of the rank for good. Only a new process can transfer again."""
        self._thread = threading.Thread(target=self._run, name=f"weft-transfer-{rank}", daemon=True)
        self._started = start
        if start:
            self._thread.start()

    # ---- from other threads

    def begin(self, offer: Admitted, bound: Bound, blocks: tuple[Blocks, ...], num_cached: int = 0) -> None:
        """Carry out ``Push``: push the contents computed so far, and later contents as computed.

        ``num_cached``: number of positions found in the rank's caches at admission. ``blocks`` must cover
        these positions; () means no blocks yet. The cached positions are pushed only after a ``computed``
        call: the step that ensures the cached contents may not have run yet.
        """
        self._put(TransferBegan(offer, bound, blocks, num_cached))

    def grow(self, key: TransferKey, blocks: tuple[Blocks, ...]) -> None:
        """Add new blocks of the sequence, for each KV cache group. Must precede the ``computed`` of the
        blocks."""
        self._put(Growing(key, blocks))

    def computed(self, key: TransferKey, layers: tuple[int, ...], begin: int, end: int) -> None:
        """Report computed positions, see ``pushes.Computed``. May precede ``begin``. On a device with
        asynchronous execution, the work must only be launched, by the calling thread."""
        self._put(p.Computed(key, layers, begin, end, self._transport.mark()))

    def fail(self, key: TransferKey, error: ErrorInfo) -> None:
        """Fail the transfer, as soon as the transfer has begun: the contents cannot be computed."""
        self._put(Failing(key, error))

    def expect(self, offer: Admitted, bound: Bound) -> None:
        """Carry out ``Expect``: accept the bytes of the transfer."""
        self._put(Expecting(offer, bound))

    def stop(self, key: TransferKey) -> None:
        """Carry out ``StopRanks``. ``RankStopped`` follows when the rank uses no memory of the transfer."""
        self._put(TransferEnding(key))

    def stop_all(self) -> None:
        """Stop all transfers: begun, expected, or with a ``computed`` call. Blocks until this rank touches
        no memory of the transfers. Raises EngineDead after a time-out."""
        carried_out = threading.Event()
        self._put(EndingAll(carried_out))
        if not self._started:
            self.turn(0.0)
        if not carried_out.wait(_END_S) and self._thread.is_alive():
            raise EngineDead("the KV transfer thread does not stop")

    def close(self) -> None:
        """End the thread, which closes the transport. Raises EngineDead after a time-out."""
        self._put(None)
        if self._thread.is_alive():
            self._thread.join(_END_S)
            if self._thread.is_alive():
                raise EngineDead("the KV transfer thread does not end")

    def _put(self, command: _Command) -> None:
        self._commands.put(command)
        self._transport.wake()

    # ---- on the thread

    def _run(self) -> None:
        """Run turns until ``close``. An error disables the transfers of the rank for good: all present and
        later transfers fail. Closes the transport."""
        try:
            while not self._done:
                self.turn(_IDLE_S)
        except Exception as error:
            log.exception("the KV transfers of rank %d have failed, and are disabled", self._rank)
            self.failure = error
            self._fail_all(_info(error))
        finally:
            self._transport.close()

    def _fail_all(self, error: ErrorInfo) -> None:
        """Fail all present and later transfers and close the transport. ``StopRanks`` is still answered."""
        self._transport.close()
        # The transport is closed, so no copy is under way: every stop is carried out.
        for key in self._stopping:
            self._tell(RankStopped(key, self._rank))
        for event in self._all_stop:
            event.set()
        for key in {*self.pushes.transfers(), *self.arrivals.transfers()}:
            self._report(key, Outcome.failed, error)
        while not self._done:
            match self._commands.get():
                case None:
                    self._done = True
                case TransferEnding(key):
                    self._tell(RankStopped(key, self._rank))
                case EndingAll(carried_out):
                    carried_out.set()
                case TransferBegan(offer) | Expecting(offer):
                    self._report(offer.key, Outcome.failed, error)

    def turn(self, seconds: float) -> None:
        """Carry out queued commands, one late event, and the events of one ``poll``. Blocks up to
        ``seconds``."""
        while not self._done:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            self._take_command(command)
        if self._done:
            return
        late = self.pushes.behind()
        # One late event per turn, then poll without a wait: other transfers need their turns.
        if late is not None:
            self._guard(late, lambda: self._push(self.pushes.on(p.More(late))))
            seconds = 0.0
        # Wake up in time to drop parked writes.
        due = self.arrivals.next_due()
        if due is not None:
            seconds = max(0.0, min(seconds, due - self._clock()))
        for event in self._transport.poll(seconds):
            self._guard(event.key, partial(self._moved, event))
        if self._stopping or self._all_stop:
            self._stopped()
        self._arrive(a.ArrivalTick())

    def _moved(self, event: a.Incoming | a.Copied | p.Written) -> None:
        if isinstance(event, p.Written):
            self._push(self.pushes.on(event))
        else:
            self._arrive(event)

    def _take_command(self, command: _Command) -> None:
        """Carry out one command. Errors of one transfer are reported as its failure."""
        match command:
            case None:
                self._done = True
            case TransferBegan(offer):
                self._guard(offer.key, lambda: self._begin(command))
            case Growing(key, blocks):
                places = partial(placed, blocks, self.dims, 0, 0)
                self._guard(key, lambda: self._push(self.pushes.on(p.Grown(key, places()))))
            case Failing(key, error):
                self._push(self.pushes.on(p.Spoiled(key, error)))
            case Expecting(offer):
                self._guard(offer.key, lambda: self._expect(command))
            case EndingAll(carried_out):
                for key in {*self.pushes.transfers(), *self.pushes.waiting(), *self.arrivals.transfers()}:
                    self._stop(key)
                self._all_stop.append(carried_out)
                self._stopped()
            case TransferEnding(key):
                self._stop(key)
            case p.Computed(key):
                self._guard(key, lambda: self._push(self.pushes.on(command)))

    def _guard(self, key: TransferKey, work: Callable[[], None]) -> None:
        """Run ``work`` of one transfer. An exception fails only the transfer."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, WeftError):
                log.exception("transfer %d/%d failed on rank %d", key.transfer, key.attempt, self._rank)
            self._report(key, Outcome.failed, _info(error))

    def _begin(self, began: TransferBegan) -> None:
        """Connect to all ranks of the receiver and start the pushes. Raises TransferMessageError for invalid
        blocks."""
        offer, bound = began.offer, began.bound
        blocks = began.blocks or (Blocks(first=0, ids=b""),) * len(self.dims.kinds)
        own = Side(self.dims, placed(blocks, self.dims, bound.start, began.num_cached, grows=True))
        there = Side(bound.dims, placed(bound.blocks, bound.dims, bound.start, offer.num_prompt))
        plans = {}
        for to, endpoint in enumerate(bound.endpoints):
            plan = SpanPlan(own, self._rank, there, to, bound.start, offer.num_prompt)
            plans[self._transport.connect(endpoint, to, CONNECT_S)] = plan
        self._push(self.pushes.on(p.Begin(offer.key, plans, offer.num_prompt, bound.start)))

    def _expect(self, expecting: Expecting) -> None:
        """Register the expected spans. Raises TransferMessageError for invalid blocks or another layout."""
        offer, bound = expecting.offer, expecting.bound
        # The sender plans with `bound.dims`, so both must agree on shares of rows.
        if [kind.shards for kind in bound.dims.kinds] != [kind.shards for kind in self.dims.kinds]:
            what = "shares of rows" if any(kind.shards for kind in bound.dims.kinds) else "whole rows"
            raise TransferMessageError(
                f"a transfer of {what} was sent to a rank that does not receive such transfers"
            )
        here = Side(self.dims, placed(bound.blocks, self.dims, bound.start, offer.num_prompt))
        expected = arriving(here, self._rank, offer.dims, bound.start, offer.num_prompt)
        self._arrive(a.ExpectedArrival(offer.key, Coverage(expected)))

    def _stop(self, key: TransferKey) -> None:
        """Stop one transfer. Copies into the rank's memory run on the same thread, so none is under way here.
        Copies out of the memory, and reads of a peer's memory, may be under way: ``_stopped`` waits for the
        end of both."""
        self._transport.cancel(key)
        self._push(self.pushes.on(p.PushStopped(key)))
        self._arrive(a.ArrivalStopped(key))
        self._stopping.append(key)
        self._stopped()

    def _stopped(self) -> None:
        """Report all stopped transfers without a copy under way."""
        quiet = [key for key in self._stopping if self._transport.quiet(key)]
        self._stopping = [key for key in self._stopping if key not in quiet]
        for key in quiet:
            self._tell(RankStopped(key, self._rank))
        if not self._stopping:
            for event in self._all_stop:
                event.set()
            self._all_stop.clear()

    def _push(self, actions: Iterable[p.Action]) -> None:
        for action in actions:
            if isinstance(action, p.PushReport):
                self._report(action.key, action.outcome, action.error)
            else:
                self._transport.write(action)

    def _arrive(self, event: a.Event) -> None:
        """Carry out the actions for ``event``: copy and check bytes, answer writes, report outcomes."""
        for action in self.arrivals.on(event, self._clock()):
            match action:
                case a.Copy(write):
                    taken = self._take(write)
                    # The `Copied` of a pending copy comes from `poll`.
                    if not isinstance(taken, TakePending):
                        self._arrive(a.Copied(write, taken))
                case a.Answer(write, error):
                    self._transport.answer(write, error)
                case a.ArrivalReport(key, outcome, error):
                    self._report(key, outcome, error)

    def _take(self, write: a.Incoming) -> ErrorInfo | TakePending | None:
        """Copy the bytes of a write and return None, the error or PENDING. Any exception is logged and
        returned."""
        try:
            return self._transport.take(write)
        except Exception as error:
            log.exception("receiving a write of transfer %d/%d failed", write.key.transfer, write.key.attempt)
            return _info(error)

    def _report(self, key: TransferKey, outcome: Outcome, error: ErrorInfo | None) -> None:
        self._tell(RankReport(key, self._rank, outcome, error))


def _info(error: Exception) -> ErrorInfo:
    if isinstance(error, WeftError):
        return error.info()
    return EngineDead("a rank failed in a transfer between groups").info()
