"""Measures one request for metrics, and traces it where requests are traced."""

from __future__ import annotations

import time
from collections.abc import Iterable

from weft.front.metrics import Metrics
from weft.front.request_trace import RequestTrace
from weft.tracing.spans import SpanContext
from weft.types.messages import TokenEvent


class RequestTimes:
    """Measures one request from its arrival; ``event`` is called with each token event as it comes."""

    def __init__(self, metrics: Metrics, trace: RequestTrace | None = None) -> None:
        self._metrics = metrics
        self._trace = trace
        self._start = time.monotonic()
        self._last: dict[int, float] = {}

    @property
    def context(self) -> SpanContext | None:
        """The request's span; None when it is not traced."""
        return None if self._trace is None else self._trace.context

    def mark(self, name: str) -> None:
        """Something happened to the request, for its trace."""
        if self._trace is not None:
            self._trace.mark(name)

    def event(self, event: TokenEvent) -> None:
        """A token event of the request arrived."""
        if event.cache_miss is not None:
            self._metrics.misses.labels(self._metrics.model, event.cache_miss.reason).inc()
        if not event.token_ids:
            return
        now = time.monotonic()
        if not self._last:
            self.mark("first token")
            self._metrics.time_to_first_token.observe(now - self._start)
        if event.sequence in self._last:
            gap = (now - self._last[event.sequence]) / len(event.token_ids)
            for _ in event.token_ids:
                self._metrics.inter_token.observe(gap)
        self._last[event.sequence] = now

    def done(self, prompt: int, generated: int, reasons: Iterable[str]) -> None:
        """The request was answered in full."""
        metrics = self._metrics
        model = self._metrics.model
        metrics.e2e.observe(time.monotonic() - self._start)
        metrics.prompt_tokens.observe(prompt)
        metrics.generation_tokens.observe(generated)
        for reason in reasons:
            metrics.success.labels(model, reason).inc()
        if self._trace is not None:
            self._trace.note(prompt_tokens=prompt, output_tokens=generated)
            self._trace.end()

    def failed(self, code: str) -> None:
        """The request ended in an error."""
        self._metrics.failure.labels(self._metrics.model, code).inc()
        if self._trace is not None:
            self._trace.end(code)

    def close(self) -> None:
        """Nothing more is done for the request. After ``done`` and ``failed`` it changes nothing."""
        if self._trace is not None:
            self._trace.end("the request was given up")
