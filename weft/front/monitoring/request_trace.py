"""Span of one client request in the API server; parent of all other spans of the request."""

from __future__ import annotations

import time

from weft.tracing.trace_spans import MAX_TRACEPARENT, Span, SpanContext, parse_traceparent
from weft.tracing.writer import SpanWriter


class RequestTrace:
    """Root span of one request, from arrival to answer. Ends once; later calls of ``end`` are ignored."""

    def __init__(self, writer: SpanWriter, body_type: str, header: str | None) -> None:
        """Begin the span now. ``header``: the client's ``traceparent``, if any. An invalid value is
        ignored, and the span begins a new trace."""
        caller = None if header is None else parse_traceparent(header[: MAX_TRACEPARENT + 1])
        context = SpanContext.root() if caller is None else caller.child()
        parent = "" if caller is None else caller.span
        self._span = Span("request", context, parent, time.monotonic(), {"weft.kind": body_type})
        self._writer = writer
        self._open = True

    @property
    def context(self) -> SpanContext:
        """Context of the request's span."""
        return self._span.context

    def mark(self, name: str) -> None:
        """Add a mark to the span."""
        if self._open:
            self._span.mark(name, time.monotonic())

    def note(self, **counts: int) -> None:
        """Set counts as attributes of the span."""
        self._span.attributes.update({f"weft.{name}": count for name, count in counts.items()})

    def end(self, error: str | None = None) -> None:
        """End the span and write the span to the trace file. ``error``: code of the error; None for an
        answered request. Only the first call counts."""
        if self._open:
            self._open = False
            self._writer.write(self._span, time.monotonic(), error)
