"""The span of one client's request, in the front: all others of the request are parts of it."""

from __future__ import annotations

import time

from weft.tracing.spans import MAX_TRACEPARENT, Span, SpanContext, parse_traceparent
from weft.tracing.writer import SpanWriter


class RequestTrace:
    """The root span of one request, from its arrival until it is answered. Ends once; later ends are
    ignored.
    """

    def __init__(self, writer: SpanWriter, kind: str, header: str | None) -> None:
        """``header``: the client's ``traceparent``, if it sent one; anything that is none is ignored."""
        caller = None if header is None else parse_traceparent(header[: MAX_TRACEPARENT + 1])
        context = SpanContext.root() if caller is None else caller.child()
        parent = "" if caller is None else caller.span
        self._span = Span("request", context, parent, time.monotonic(), {"weft.kind": kind})
        self._writer = writer
        self._open = True

    @property
    def context(self) -> SpanContext:
        """The context of the request's span."""
        return self._span.context

    def mark(self, name: str) -> None:
        """Something happened to the request."""
        if self._open:
            self._span.mark(name, time.monotonic())

    def note(self, **counts: int) -> None:
        """Counts of the request."""
        self._span.attributes.update({f"weft.{name}": count for name, count in counts.items()})

    def end(self, error: str | None = None) -> None:
        """Ends the span: the request was answered, or failed with the code ``error``."""
        if self._open:
            self._open = False
            self._writer.write(self._span, time.monotonic(), error)
