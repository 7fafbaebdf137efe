"""Times of a line of a batch: counts without latencies, which describe online requests alone."""

from __future__ import annotations

from collections.abc import Sequence

from weft.front.monitoring.request_times import RequestTimes
from weft.types.messages import TokenEvent


class BatchTimes(RequestTimes):
    """``RequestTimes`` of a line of a batch. A line waits for free slots, so its latencies say nothing."""

    def event(self, event: TokenEvent) -> None:
        """Count a token event for the log."""
        if self._facts is not None:
            self._facts.output_tokens += len(event.token_ids)

    def done(self, prompt: int, cached: int, generated: Sequence[int], reasons: Sequence[str]) -> None:
        """Record the end of an answered line in the counts of metrics, in trace and log."""
        metrics = self._metrics
        metrics.prompt_tokens.observe(prompt)
        metrics.computed_tokens.observe(max(prompt - cached, 0))
        metrics.generation_tokens.observe(sum(generated))
        for reason in reasons:
            metrics.success.labels(metrics.model, reason).inc()
        if self._trace is not None:
            self._trace.note(prompt_tokens=prompt, output_tokens=sum(generated))
            self._trace.end()
        self._log(*reasons)
