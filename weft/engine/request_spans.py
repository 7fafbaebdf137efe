"""A head's spans of the sequences that a front traces: what each waited for here, and its room.

    does all     queue ──admitted──> prefill ──first token──> decode ──> end
    prefills     queue ──admitted──> prefill ──first token──> end          room: send
    decodes      await ──cache is here──> queue ──admitted──> decode ──> end   room: receive

Made only with --trace-requests; without it a head asks ``is None`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.common.errors import ErrorInfo
from weft.engine.room_notes import RoomNotes
from weft.tracing.spans import Span, SpanContext, child_of, parse_traceparent
from weft.tracing.writer import SpanWriter
from weft.types.messages import Submit, TokenEvent
from weft.types.rooms import RoomKey

MOST_ROOMS = 16384
"""Spans of rooms that may be open; the oldest one is forgotten beyond it."""


@dataclass(slots=True)
class _Traced:
    """A live sequence."""

    parent: SpanContext
    span: Span
    """What it is in now."""
    attempt: int
    tokens: int = 0


class RequestSpans:
    """One for each head that traces. Used from the thread that steps."""

    def __init__(self, writer: SpanWriter, now: Callable[[], float]) -> None:
        self._writer = writer
        self._now = now
        self._live: dict[int, _Traced] = {}
        self._rooms: dict[RoomKey, Span] = {}

    def submitted(self, submit: Submit, arrived: float) -> None:
        """A sequence was taken in that came at ``arrived``."""
        parent = parse_traceparent(submit.trace)
        if parent is None:
            return
        fetches = submit.room is not None and not submit.room.sends
        span = self._span(parent, "await" if fetches else "queue", arrived, submit.sequence, submit.attempt)
        span.attributes["weft.prompt_tokens"] = len(submit.prompt_ids) // 4
        span.attributes["weft.emitted_tokens"] = len(submit.emitted_ids) // 4
        self._live[submit.sequence] = _Traced(parent, span, submit.attempt)
        if submit.room is not None:
            name = "receive" if fetches else "send"
            if len(self._rooms) >= MOST_ROOMS:
                del self._rooms[next(iter(self._rooms))]
            room = self._span(parent, name, arrived, submit.sequence, submit.attempt)
            room.attributes["weft.peer"] = submit.room.peer.name
            self._rooms[submit.room.key] = room

    def admitted(self, sequences: Iterable[int], now: float) -> None:
        """A step was planned that gives slots to them."""
        for sequence in sequences:
            traced = self._live.get(sequence)
            if traced is None:
                continue
            if traced.span.name == "queue":
                self._next(traced, sequence, "decode" if traced.tokens else "prefill", now)
            else:
                traced.span.mark("admitted again", now)

    def told(self, events: list[TokenEvent]) -> None:
        """What the head tells fronts."""
        if not events or not self._live:
            return
        now = self._now()
        for event in events:
            traced = self._live.get(event.sequence)
            if traced is not None:
                self._told(traced, event, now)

    def _told(self, traced: _Traced, event: TokenEvent, now: float) -> None:
        if event.token_ids:
            first = not traced.tokens
            traced.tokens += len(event.token_ids)
            name = traced.span.name
            if name == "await":
                self._next(traced, event.sequence, "queue", now)
            elif name == "prefill" and event.finish is None:
                traced.span.attributes["weft.cached_tokens"] = event.num_cached
                self._next(traced, event.sequence, "decode", now)
            elif name == "decode" and not first and not traced.span.events:
                traced.span.mark("first decoded token", now)
        if event.finish is not None:
            del self._live[event.sequence]
            span = traced.span
            span.attributes["weft.finish"] = event.finish
            span.attributes["weft.output_tokens"] = traced.tokens
            self._writer.write(span, now, None if event.error is None else event.error.code)

    def _next(self, traced: _Traced, sequence: int, name: str, now: float) -> None:
        """The sequence is in another stage now."""
        self._writer.write(traced.span, now)
        traced.span = self._span(traced.parent, name, now, sequence, traced.attempt)

    def _span(self, parent: SpanContext, name: str, start: float, sequence: int, attempt: int) -> Span:
        return child_of(parent, name, start, sequence=f"{sequence:x}", attempt=attempt)

    def room_ended(self, key: RoomKey, notes: RoomNotes, now: float, error: ErrorInfo | None) -> None:
        """A room has landed, or failed. Again is fine."""
        span = self._rooms.pop(key, None)
        if span is None:
            return
        for name, when in sorted(notes.marks.items(), key=lambda mark: mark[1]):
            span.mark(name, when)
        span.attributes["weft.bytes"] = notes.nbytes
        failed = error is not None and error.blame != "client"
        self._writer.write(span, now, error.code if error is not None and failed else None)

    def close(self) -> None:
        """The head ends, and with it all that is open."""
        now = self._now()
        for span in [*(traced.span for traced in self._live.values()), *self._rooms.values()]:
            self._writer.write(span, now, "the head ended")
        self._live.clear()
        self._rooms.clear()
        self._writer.close()
