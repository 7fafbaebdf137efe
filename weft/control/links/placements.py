"""Placement spans of an API server's traced sequences. A span starts when a Submit is sent to an instance.
The span ends with the instance's last event of the sequence, the loss of the instance, or a Finish.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weft.control.fleet import fleet_events as e
from weft.tracing.trace_spans import Span, SpanContext, child_of
from weft.tracing.writer import SpanWriter
from weft.types import messages as m


class Placements:
    """The placement spans of the links of one API server. Used from the event loop of the links."""

    def __init__(self, writer: SpanWriter, now: Callable[[], float]) -> None:
        self._writer, self._now = writer, now
        self._parents: dict[int, SpanContext] = {}
        """Traced open sequence -> span of the request."""
        self._open: dict[tuple[int, str], tuple[Span, int]] = {}
        """(sequence, instance) -> (open span, attempt)."""

    def open(self, sequence: int, parent: SpanContext) -> None:
        """Trace ``sequence``, a part of the request with span ``parent``."""
        self._parents[sequence] = parent

    def sent(self, instance: str, message: m.ToEngine) -> m.ToEngine:
        """Open or close spans for a message to be sent. Return the message to send instead, with the span's
        context.
        """
        if isinstance(message, m.Finish):
            self._end(message.sequence, instance, "left")
        if not isinstance(message, m.Submit):
            return message
        parent = self._parents.get(message.sequence)
        if parent is None:
            return message
        self._end(message.sequence, instance, "again")
        span = child_of(
            parent,
            "placement",
            self._now(),
            sequence=f"{message.sequence:x}",
            attempt=message.attempt,
            choice=message.choice,
            instance=instance,
            part=_part(message),
        )
        self._open[message.sequence, instance] = (span, message.attempt)
        return msgspec.structs.replace(message, trace=span.context.traceparent())

    def record(self, received: e.Event) -> None:
        """Mark first tokens, and close spans at final events, if ``received`` brings tokens.

        Other events are ignored.
        """
        if not isinstance(received, e.Received) or not isinstance(received.message, m.Tokens):
            return
        instance = received.instance
        for event in received.message.events:
            found = self._open.get((event.sequence, instance))
            # Events of an earlier attempt belong to a closed span.
            if found is None or found[1] != event.attempt:
                continue
            if event.token_ids and not found[0].events:
                found[0].mark("first token", self._now())
            if event.finish is not None:
                error = None if event.error is None else event.error.code
                self._end(event.sequence, instance, event.finish, error)

    def lost(self, instance: str) -> None:
        """Close the spans of an instance after the loss of the process."""
        for sequence, name in [key for key in self._open if key[1] == instance]:
            self._end(sequence, name, "lost", "the instance was lost")

    def closed(self, sequence: int) -> None:
        """Close the spans of a sequence, which has ended for the client."""
        if self._parents.pop(sequence, None) is not None:
            for key in [key for key in self._open if key[0] == sequence]:
                self._end(*key, "left")

    def _end(self, sequence: int, instance: str, finish: str, error: str | None = None) -> None:
        found = self._open.pop((sequence, instance), None)
        if found is not None:
            found[0].attributes["weft.finish"] = finish
            self._writer.write(found[0], self._now(), error)


def _part(message: m.Submit) -> str:
    """Return the instance's part in the sequence: "prefill", "decode", "encode" or "all"."""
    if message.transfer is not None:
        return "prefill" if message.transfer.sends else "decode"
    encodes = any(item.transfer is not None and item.transfer.sends for item in message.media)
    return "encode" if encodes else "all"
