"""Spans as in OpenTelemetry: one stage of a request in one process, with start and end.

Spans contain counts and names only, never text. The ids travel as W3C ``traceparent``.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = str | int | float

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACEPARENT = 256
"""Maximum length of an accepted header, in characters."""
MAX_EVENTS = 64
"""Maximum events of one span. Later events are dropped."""


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Identity of one span in hex digits: 32 for the trace, 16 for the span."""

    trace: str
    span: str
    flags: int = 1
    """Flags of the ``traceparent``. Bit 0: the caller samples the trace."""

    @property
    def sampled(self) -> bool:
        """True for a trace that goes to the collector."""
        return bool(self.flags & 1)

    @classmethod
    def root(cls) -> SpanContext:
        """Return the root context of a new trace."""
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    def child(self) -> SpanContext:
        """Return the context of a new span in the same trace, with the same flags."""
        return SpanContext(self.trace, secrets.token_hex(8), self.flags)

    def traceparent(self) -> str:
        """Return the W3C form, version 00."""
        return f"00-{self.trace}-{self.span}-{self.flags:02x}"


def parse_traceparent(text: str) -> SpanContext | None:
    """Return the context of a ``traceparent``; None for other forms, ids of zeros, and version ff."""
    if len(text) > MAX_TRACEPARENT:
        return None
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    return SpanContext(trace, span, int(flags, 16))


@dataclass(slots=True)
class Span:
    """An open span. Times are seconds of the process's monotonic clock."""

    name: str
    context: SpanContext
    parent: str
    """Id of the parent span; "" for none."""
    start: float
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[str, float]] = field(default_factory=list)
    """Events as (name, time)."""
    end: float = 0.0
    error: str | None = None
    """Reason for the failure; None for success."""

    def mark(self, name: str, now: float) -> None:
        """Record an event at time ``now``, in seconds. Events beyond ``MAX_EVENTS`` are dropped."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((name, now))


def child_of(parent: SpanContext, name: str, start: float, **attributes: Value) -> Span:
    """Return a span within ``parent``. Each attribute name gets the prefix ``weft.``."""
    named = {f"weft.{key}": value for key, value in attributes.items()}
    return Span(name, parent.child(), parent.span, start, named)
