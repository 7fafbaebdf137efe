"""An engine's spans of traced sequences: the stages of each sequence on the engine process, and the
transfers.

    does all     queue ──admitted──> prefill ──first token──> decode ──> end
    prefills     queue ──admitted──> prefill ──first token──> end          transfer: send
    decodes      await ──cache is here──> queue ──admitted──> decode ──> end   transfer: receive
    encodes      queue ──its first image is in a step──> encode ──> end        transfers: send image

A sequence with images from encode groups starts with ``await images`` until all images are received
(transfers: receive image).

Used only with --trace-requests. Without tracing an engine process pays one ``is None`` test per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from weft.common.errors import ErrorInfo
from weft.engine.disagg.transfer_notes import TransferNotes, TransferTally
from weft.tracing.trace_spans import Span, SpanContext, child_of, parse_traceparent
from weft.tracing.writer import SpanWriter
from weft.types.messages import Submit, TokenEvent
from weft.types.transfer import TransferKey, TransferParameters

MOST_TRANSFERS = 16384
"""Maximum open transfer spans. Beyond the limit the oldest span is dropped."""


@dataclass(slots=True)
class _Traced:
    """A live traced sequence."""

    parent: SpanContext
    span: Span
    """Span of the current stage."""
    attempt: int
    tokens: int = 0
    encodes: bool = False
    images: set[TransferKey] = field(default_factory=set)
    """Transfers of images not received yet."""


class RequestSpans:
    """The request spans of one engine process. Used from the stepping thread."""

    def __init__(self, writer: SpanWriter, now: Callable[[], float]) -> None:
        """``writer``: closed by ``close``. ``now``: the engine's clock."""
        self._writer = writer
        self._now = now
        self._live: dict[int, _Traced] = {}
        self._transfers: dict[TransferKey, Span] = {}
        self._images: dict[TransferKey, int] = {}
        """Transfer of an image not received yet -> live sequence."""

    def follow(self, tallies: Iterable[TransferTally]) -> None:
        """Subscribe to the ends of the transfers of ``tallies``."""
        for tally in tallies:
            tally.ended = self.transfer_ended

    def submitted(self, submit: Submit, arrived: float) -> None:
        """Open the spans of a sequence, starting at ``arrived``: one for its first stage and one per
        transfer. Untraced sequences are ignored.
        """
        parent = parse_traceparent(submit.trace)
        if parent is None:
            return
        # The first stage depends on the input for which the sequence is blocked.
        fetches = submit.transfer is not None and not submit.transfer.sends
        parameter_lists = [item.transfer for item in submit.media if item.transfer is not None]
        images = {parameters.key for parameters in parameter_lists if not parameters.sends}
        name = "await" if fetches else "await images" if images else "queue"
        span = self._span(parent, name, arrived, submit.sequence, submit.attempt)
        span.attributes["weft.prompt_tokens"] = len(submit.prompt_ids) // 4
        span.attributes["weft.emitted_tokens"] = len(submit.emitted_ids) // 4
        if submit.media:
            span.attributes["weft.images"] = len(submit.media)
        encodes = any(parameters.sends for parameters in parameter_lists)
        self._live[submit.sequence] = _Traced(parent, span, submit.attempt, encodes=encodes, images=images)
        self._images.update(dict.fromkeys(images, submit.sequence))
        if submit.transfer is not None:
            self._open(submit.transfer, "receive" if fetches else "send", parent, arrived, submit)
        for parameters in parameter_lists:
            self._open(
                parameters, "send image" if parameters.sends else "receive image", parent, arrived, submit
            )

    def _open(
        self, parameters: TransferParameters, name: str, parent: SpanContext, arrived: float, submit: Submit
    ) -> None:
        """Open the span of a transfer. Above ``MOST_TRANSFERS`` open transfers, drop the oldest span."""
        if len(self._transfers) >= MOST_TRANSFERS:
            del self._transfers[next(iter(self._transfers))]
        transfer = self._span(parent, name, arrived, submit.sequence, submit.attempt)
        transfer.attributes["weft.peer"] = parameters.peer.name
        self._transfers[parameters.key] = transfer

    def admitted(self, sequences: Iterable[int], now: float) -> None:
        """Move the spans of ``sequences``, which have slots at ``now``, from "queue" to "encode", "prefill"
        or "decode". A second admission is only a mark. Untraced sequences are ignored.
        """
        for sequence in sequences:
            traced = self._live.get(sequence)
            if traced is None:
                continue
            if traced.span.name == "queue":
                name = "encode" if traced.encodes else "decode" if traced.tokens else "prefill"
                self._next(traced, sequence, name, now)
            else:
                traced.span.mark("admitted again", now)

    def record(self, events: list[TokenEvent]) -> None:
        """Advance or close the spans of sequences according to ``events``."""
        if not events or not self._live:
            return
        now = self._now()
        for event in events:
            traced = self._live.get(event.sequence)
            if traced is not None:
                self._advance(traced, event, now)

    def _advance(self, traced: _Traced, event: TokenEvent, now: float) -> None:
        """Advance the span of one sequence: blocked -> queue -> prefill -> decode.

        At a finish, write and forget the span.
        """
        if event.token_ids:
            first = not traced.tokens
            traced.tokens += len(event.token_ids)
            # A first token while blocked on KV came from the prefill group with the cache: the sequence is
            # queued now.
            name = traced.span.name
            if name == "await":
                self._next(traced, event.sequence, "queue", now)
            elif name == "prefill" and event.finish is None:
                traced.span.attributes["weft.cached_tokens"] = event.num_cached
                self._next(traced, event.sequence, "decode", now)
            elif name == "decode" and not first and not traced.span.events:
                traced.span.mark("first decoded token", now)
        if event.finish is not None:
            del self._live[event.sequence]
            for key in traced.images:
                self._images.pop(key, None)
            span = traced.span
            span.attributes["weft.finish"] = event.finish
            span.attributes["weft.output_tokens"] = traced.tokens
            self._writer.write(span, now, None if event.error is None else event.error.code)

    def _next(self, traced: _Traced, sequence: int, name: str, now: float) -> None:
        """Close the current span of the sequence and open the span of stage ``name``."""
        self._writer.write(traced.span, now)
        traced.span = self._span(traced.parent, name, now, sequence, traced.attempt)

    def _span(self, parent: SpanContext, name: str, start: float, sequence: int, attempt: int) -> Span:
        return child_of(parent, name, start, sequence=f"{sequence:x}", attempt=attempt)

    def transfer_ended(
        self, key: TransferKey, notes: TransferNotes, now: float, error: ErrorInfo | None
    ) -> None:
        """Write the span of a transfer with its marks and bytes, and forget it.

        Idempotent. A cancellation by the client side is not an error.
        """
        if error is None:
            self._image_received(key, now)
        span = self._transfers.pop(key, None)
        if span is None:
            return
        for name, when in sorted(notes.marks.items(), key=lambda mark: mark[1]):
            span.mark(name, when)
        span.attributes["weft.bytes"] = notes.nbytes
        failed = error is not None and error.blame != "client"
        self._writer.write(span, now, error.code if error is not None and failed else None)

    def _image_received(self, key: TransferKey, now: float) -> None:
        """Record a received image. After the last image the sequence is queued."""
        sequence = self._images.pop(key, None)
        traced = None if sequence is None else self._live.get(sequence)
        if sequence is None or traced is None:
            return
        traced.images.discard(key)
        if not traced.images and traced.span.name == "await images":
            self._next(traced, sequence, "queue", now)

    def close(self) -> None:
        """Write all open spans as failed and close the writer, at the end of the engine process."""
        now = self._now()
        for span in [*(traced.span for traced in self._live.values()), *self._transfers.values()]:
            self._writer.write(span, now, "the engine ended")
        self._live.clear()
        self._transfers.clear()
        self._writer.close()
