"""A span: a stretch of one request's time in one process, as OpenTelemetry has it. Counts and names only,
never text. The ids travel as W3C ``traceparent``.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = str | int | float

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACEPARENT = 256
"""Characters of a header that are looked at."""
MAX_EVENTS = 64
"""Of one span; later ones are not kept."""


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Names one span: hex digits, 32 of the trace and 16 of the span."""

    trace: str
    span: str

    @classmethod
    def root(cls) -> SpanContext:
        """The root context of a new trace."""
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    def child(self) -> SpanContext:
        """Another span of the same trace."""
        return SpanContext(self.trace, secrets.token_hex(8))

    def traceparent(self) -> str:
        """As W3C writes it, version 00, sampled."""
        return f"00-{self.trace}-{self.span}-01"


def parse_traceparent(text: str) -> SpanContext | None:
    """What a ``traceparent`` names; None for anything that is none: other forms, ids of zeros, version ff."""
    if len(text) > MAX_TRACEPARENT:
        return None
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None:
        return None
    version, trace, span, _, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    return SpanContext(trace, span)


@dataclass(slots=True)
class Span:
    """A span that has not ended. Times are seconds of the process's monotonic clock."""

    name: str
    context: SpanContext
    parent: str
    """The span that it is a part of; "" for none."""
    start: float
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[str, float]] = field(default_factory=list)
    """(name, when)."""
    end: float = 0.0
    error: str | None = None
    """Why it failed; None when it did not."""

    def mark(self, name: str, now: float) -> None:
        """Something happened within it."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((name, now))


def child_of(parent: SpanContext, name: str, start: float, **attributes: Value) -> Span:
    """A span within ``parent``. Dots of attributes' names are given as underscores after ``weft``."""
    named = {f"weft.{key}": value for key, value in attributes.items()}
    return Span(name, parent.child(), parent.span, start, named)
