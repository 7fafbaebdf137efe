"""Times of one request for metrics, log and trace."""

from __future__ import annotations

import time
from collections.abc import Sequence

from weft.front.monitoring.metrics import Metrics
from weft.front.monitoring.request_log import RequestFacts, log_end
from weft.front.monitoring.request_trace import RequestTrace
from weft.tracing.trace_spans import SpanContext
from weft.types.messages import TokenEvent


class RequestTimes:
    """Measures one request from its arrival. The caller passes each token event to ``event``."""

    def __init__(
        self, metrics: Metrics, trace: RequestTrace | None = None, facts: RequestFacts | None = None
    ) -> None:
        """``facts``: facts for the log line; None if requests are not logged."""
        self._metrics = metrics
        self._trace = trace
        self._facts = facts
        self._start = time.monotonic()
        self._first: float | None = None
        """Seconds from the arrival to the first token."""
        self._last: dict[int, float] = {}

    @property
    def context(self) -> SpanContext | None:
        """Context of the request's span; None without tracing."""
        return None if self._trace is None else self._trace.context

    def of(self, metrics: Metrics) -> None:
        """Count the request in ``metrics`` from now on: those of its model, in a server of several models."""
        self._metrics = metrics

    def named(self, name: str) -> None:
        """Record the id of the answer."""
        if self._facts is not None:
            self._facts.id = name

    def asked(self, prompt: int, n: int, most: int) -> None:
        """Record the size of the request in metrics and log facts: ``prompt`` tokens, ``n`` choices, at
        most ``most`` output tokens per choice."""
        self._metrics.asked_n.observe(n)
        self._metrics.asked_tokens.observe(most)
        if self._facts is not None:
            self._facts.prompt_tokens = prompt

    def mark(self, name: str) -> None:
        """Add a mark to the request's trace."""
        if self._trace is not None:
            self._trace.mark(name)

    def event(self, event: TokenEvent) -> None:
        """Record a token event: a cache miss, the time to the first token, and the time between tokens of
        each sequence. An event of several tokens counts as that many equal gaps."""
        if event.cache_miss is not None:
            self._metrics.misses.labels(self._metrics.model, event.cache_miss.reason).inc()
        count = len(event.token_ids)
        if not count:
            return
        now = time.monotonic()
        if self._facts is not None:
            self._facts.output_tokens += count
        if self._first is None:
            self.mark("first token")
            self._first = now - self._start
            self._metrics.time_to_first_token.observe(self._first)
        last = self._last.get(event.sequence)
        if last is not None:
            self._metrics.inter_token.add((now - last) / count, count)
        self._last[event.sequence] = now

    def done(self, prompt: int, cached: int, generated: Sequence[int], reasons: Sequence[str]) -> None:
        """Record the end of a fully answered request in metrics, trace and log. Call at most once.

        ``prompt``: prompt tokens. ``cached``: prompt tokens found in the prefix cache. ``generated``: output
        tokens of each choice. ``reasons``: finish reason of each choice.
        """
        metrics = self._metrics
        model = self._metrics.model
        took, longest = time.monotonic() - self._start, max(generated, default=0)
        metrics.e2e.observe(took)
        metrics.prompt_tokens.observe(prompt)
        metrics.computed_tokens.observe(max(prompt - cached, 0))
        metrics.generation_tokens.observe(sum(generated))
        metrics.longest_choice.observe(longest)
        if self._first is not None:
            metrics.decode.observe(took - self._first)
            if longest > 1:
                metrics.time_per_token.observe((took - self._first) / (longest - 1))
        for reason in reasons:
            metrics.success.labels(model, reason).inc()
        if self._trace is not None:
            self._trace.note(prompt_tokens=prompt, output_tokens=sum(generated))
            self._trace.end()
        self._log(*reasons)

    def failed(self, code: str) -> None:
        """Record the end of a request with an error in metrics, log and trace. ``code``: the error's code.
        The metrics count every call; log and trace only the first end."""
        self._metrics.failure.labels(self._metrics.model, code).inc()
        if self._trace is not None:
            self._trace.end(code)
        self._log(code)

    def close(self) -> None:
        """End trace and log of a request without an end: as abandoned. No effect after ``done`` and
        ``failed``."""
        if self._trace is not None:
            self._trace.end("the request was abandoned")
        self._log("given_up")

    def _log(self, *end: str) -> None:
        """Log the end of the request, at most once."""
        facts, self._facts = self._facts, None
        if facts is not None:
            log_end(facts, self._metrics.model, self._first, time.monotonic() - self._start, end)
