"""Times that sequences spend in the stages of an engine: in the queue, and in prefill until the first token.

    submitted ──queue──> admitted ──prefill──> first token

A continued sequence is not measured again, neither after a preemption nor from another engine. The spans of
traced requests receive the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weft.engine.disagg.transfer_notes import TransferTally
from weft.engine.request_spans import RequestSpans
from weft.tracing.writer import SpanWriter
from weft.types.messages import READINESS_SALT, SECONDS, STEP_TOKENS, Measures, Submit, TokenEvent


class StageTimes:
    """Queue and prefill times of one engine. Used from the stepping thread."""

    def __init__(self, writer: SpanWriter | None, now: Callable[[], float]) -> None:
        """``writer``: receives the spans; None if requests are not traced."""
        self._writer = writer
        self._spans = None if writer is None else RequestSpans(writer, now)
        self._now = now
        self._queued: dict[int, float] = {}
        """Sequence without a slot so far -> its arrival time."""
        self._prefilling: dict[int, float] = {}
        """Sequence with a slot and without a token -> time at which the sequence got the slot."""
        self.queue = Measures()
        self.prefill = Measures()
        self.step_tokens = Measures()

    def follow(self, tallies: Iterable[TransferTally]) -> None:
        """Record the ends of the transfers of ``tallies`` in the spans."""
        if self._spans is not None:
            self._spans.follow(tallies)

    def submitted(self, submit: Submit, arrived: float) -> None:
        """Record the arrival of a sequence. Continued sequences and readiness probes are not measured."""
        if not submit.emitted_ids and submit.salt != READINESS_SALT:
            self._queued[submit.sequence] = arrived
        if self._spans is not None and submit.trace:
            self._spans.submitted(submit, arrived)

    def admitted(self, sequences: Iterable[int], now: float, tokens: int = 0) -> None:
        """Record the slots given to ``sequences`` by a planned step: end their queue time and begin their
        prefill time. ``tokens``: tokens of the step.
        """
        if tokens:
            self.step_tokens = self.step_tokens.add(STEP_TOKENS, tokens)
        if self._spans is not None:
            sequences = list(sequences)
            self._spans.admitted(sequences, now)
        for sequence in sequences:
            arrived = self._queued.pop(sequence, None)
            if arrived is not None:
                self.queue = self.queue.add(SECONDS, now - arrived)
                self._prefilling[sequence] = now

    def record(self, events: list[TokenEvent]) -> None:
        """Record ``events``, which leave the engine: first tokens add to ``prefill``, finishes drop the open
        times.
        """
        if self._spans is not None:
            self._spans.record(events)
        # Called for every step: cheap without open times.
        if not (events and (self._prefilling or self._queued)):
            return
        now = self._now()
        for event in events:
            if event.token_ids:
                began = self._prefilling.pop(event.sequence, None)
                if began is not None:
                    self.prefill = self.prefill.add(SECONDS, now - began)
            if event.finish is not None:
                self.forget(event.sequence)

    def forget(self, sequence: int) -> None:
        """Drop the open times of an ended sequence."""
        self._queued.pop(sequence, None)
        self._prefilling.pop(sequence, None)

    def stats(self) -> dict[str, Any]:
        """Return the fields of ``EngineStats`` that are measured here."""
        return {
            "queue_times": self.queue,
            "prefill_times": self.prefill,
            "step_tokens": self.step_tokens,
            "spans_dropped": 0 if self._writer is None else self._writer.dropped,
        }

    def close(self) -> None:
        """Close the spans."""
        if self._spans is not None:
            self._spans.close()
