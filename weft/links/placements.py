"""A front's spans of the places of its traced sequences: one from each Submit that is sent to an instance
until that instance has said its last of the sequence, lost it, or was told to end it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weft.routing import events as e
from weft.tracing.spans import Span, SpanContext, child_of
from weft.tracing.writer import SpanWriter
from weft.types import messages as m

SINCE = 3
"""Messages' version from which a Submit names its span."""


class Placements:
    """One for the links of a front that traces. Used from their event loop."""

    def __init__(self, writer: SpanWriter, now: Callable[[], float]) -> None:
        self._writer, self._now = writer, now
        self._parents: dict[int, SpanContext] = {}
        """Of each open sequence that is traced."""
        self._open: dict[tuple[int, str], tuple[Span, int]] = {}
        """(sequence, instance) -> its span, and the attempt."""

    def open(self, sequence: int, parent: SpanContext) -> None:
        """Follows ``sequence``, which is a part of the request ``parent``."""
        self._parents[sequence] = parent

    def sent(self, instance: str, version: int, message: m.ToHead) -> m.ToHead:
        """``message`` is about to be sent; returns what to send, which names the span."""
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
        if version < SINCE:
            return message
        return msgspec.structs.replace(message, trace=span.context.traceparent())

    def heard(self, received: e.Event) -> None:
        """Marks spans by a message that is about to be given to the fleet."""
        if not isinstance(received, e.Received) or not isinstance(received.message, m.Tokens):
            return
        instance = received.instance
        for event in received.message.events:
            found = self._open.get((event.sequence, instance))
            if found is None or found[1] != event.attempt:
                continue
            if event.token_ids and not found[0].events:
                found[0].mark("first token", self._now())
            if event.finish is not None:
                error = None if event.error is None else event.error.code
                self._end(event.sequence, instance, event.finish, error)

    def lost(self, instance: str) -> None:
        """The process that was the instance is gone."""
        for sequence, name in [key for key in self._open if key[1] == instance]:
            self._end(sequence, name, "lost", "the instance was lost")

    def closed(self, sequence: int) -> None:
        """Ends the spans of a sequence that has ended for its client."""
        if self._parents.pop(sequence, None) is not None:
            for key in [key for key in self._open if key[0] == sequence]:
                self._end(*key, "left")

    def _end(self, sequence: int, instance: str, finish: str, error: str | None = None) -> None:
        found = self._open.pop((sequence, instance), None)
        if found is not None:
            found[0].attributes["weft.finish"] = finish
            self._writer.write(found[0], self._now(), error)


def _part(message: m.Submit) -> str:
    """What an instance does with it."""
    if message.room is not None:
        return "prefill" if message.room.sends else "decode"
    encodes = any(item.room is not None and item.room.sends for item in message.media)
    return "encode" if encodes else "all"
