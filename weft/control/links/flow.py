"""Queues of token events between the links and the handler of a client request.

While the reader waits, new events may go to the reader's ``Taker`` at once, without a change of task. All
other events are queued. Unread events are merged per sequence. So the context length bounds the number of
events, and a slow client never delays another client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from weft.common.errors import WeftError
from weft.types.messages import LogprobColumns, TokenEvent
from weft.types.routes import joined

MERGE_AT = 32
"""Number of unread events of one sequence at which the events are merged."""


Observer: TypeAlias = Callable[[TokenEvent], None]
Taker: TypeAlias = Callable[[list[TokenEvent]], bool]
"""Takes the new events of a flow while the reader waits. Returns False to wake the reader: ``next`` then
returns without these events. Never raises."""


class Flow:
    """Events of the sequences of one request. One writer (the links), one reader, one event loop.

    ``fail`` ends the flow: the reader still gets the unread events; every later ``next`` raises the error.
    """

    def __init__(self, sequences: Sequence[int], observe: Observer | None = None) -> None:
        """``observe``: called with each event at once, before the reader."""
        self.open: dict[int, None] = dict.fromkeys(sequences)
        """Sequences that an engine process may still work on, in order. The links remove ended sequences."""
        self._waiting: dict[int, list[TokenEvent]] = {}
        self._wake = asyncio.Event()
        self._taker: Taker | None = None
        """Set while the reader waits in ``next``."""
        self._error: WeftError | None = None
        self._observe = observe

    def push(self, events: list[TokenEvent], at_once: bool = True) -> None:
        """Give new events to the waiting reader's taker, or append the events; without ``at_once``, always
        append. Does not block. The observer receives each event at once, unmerged."""
        if self._observe is not None:
            for event in events:
                self._observe(event)
        # Once woken, the reader takes the queue first: later events must stay behind.
        if at_once and self._taker is not None and not self._wake.is_set():
            if not self._taker(events):
                self._wake.set()
            return
        for event in events:
            waiting = self._waiting.setdefault(event.sequence, [])
            waiting.append(event)
            if len(waiting) >= MERGE_AT:
                self._waiting[event.sequence] = merge(waiting)
        self._wake.set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def fail(self, error: WeftError) -> None:
        """End the flow with ``error`` for the reader. Only the first error counts."""
        if self._error is None:
            self._error = error
        self._wake.set()

    def wake(self) -> None:
        """Wake the reader, even without events."""
        self._wake.set()

    async def next(self, taker: Taker | None = None) -> list[TokenEvent]:
        """Return all events since the last call, merged: at least one event, or none after ``wake``.

        Waits until then. During the wait ``taker`` takes the new events. Raises the error given to ``fail``
        after the last event was returned.
        """
        self._taker = taker
        try:
            await self._wake.wait()
        finally:
            self._taker = None
        if self._error is None:
            self._wake.clear()
        elif not self._waiting:
            raise self._error
        taken = self._waiting
        self._waiting = {}
        return [event for events in taken.values() for event in merge(events)]


def merge(events: list[TokenEvent]) -> list[TokenEvent]:
    """Return ``events`` with neighbours joined, except neighbours with logprobs of different shapes."""
    if len(events) < 2:
        return events
    merged: list[TokenEvent] = []
    run: list[TokenEvent] = []
    for event in events:
        if run and not _alike(run[0], event):
            merged.append(_join(run))
            run = []
        run.append(event)
    merged.append(_join(run))
    return merged


def _alike(first: TokenEvent, other: TokenEvent) -> bool:
    """Return True if both events can be joined. Tokens and logprobs must be present in both or absent in
    both, with equal widths. Prompt logprobs must not follow tokens.
    """
    return _shape(first) == _shape(other) and (other.prompt_logprobs is None or not first.token_ids)


def _shape(event: TokenEvent) -> tuple[int | None, int | None] | None:
    if not event.token_ids and event.prompt_logprobs is None:
        return None
    return (_width(event.logprobs), _width(event.prompt_logprobs))


def _width(columns: LogprobColumns | None) -> int | None:
    return None if columns is None else columns.width


def _join(run: list[TokenEvent]) -> TokenEvent:
    """Return one event with the tokens, logprobs and counts of all events of ``run``.

    The end and other fields come from the last.
    """
    if len(run) == 1:
        return run[0]
    last = run[-1]
    return msgspec.structs.replace(
        # All other fields come from the last event, which has the end, if there is one.
        last,
        token_ids=tuple(token for event in run for token in event.token_ids),
        logprobs=_join_columns([event.logprobs for event in run]),
        prompt_logprobs=_join_columns([event.prompt_logprobs for event in run]),
        num_cached=max(event.num_cached for event in run),
        accepted=sum(event.accepted for event in run),
        rejected=sum(event.rejected for event in run),
        routes=joined([event.routes for event in run if event.routes is not None]),
        cache_miss=next((event.cache_miss for event in run if event.cache_miss is not None), None),
    )


def _join_columns(columns: list[LogprobColumns | None]) -> LogprobColumns | None:
    """Return all logprobs as one, in order; None if all are None. The widths must be equal."""
    present = [c for c in columns if c is not None]
    if len(present) < 2:
        return present[0] if present else None
    return LogprobColumns(
        width=present[0].width,
        ids=b"".join(c.ids for c in present),
        values=b"".join(c.values for c in present),
        rank=b"".join(c.rank for c in present),
    )
