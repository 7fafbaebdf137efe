"""The record of one request after its end, and the names of outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Outcome = str
"""The outcome of a request. ``ok``; ``unfinished`` (the run was cut short); or the kind of failure:
``connect``, ``timeout``, ``http_429`` (any status), ``stream_error`` (an error reported inside a stream),
``broken`` (the stream ended early), ``protocol`` (an answer that violates the API)."""

Counted = Literal["usage", "token_ids", "chunks"]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds of one clock."""

    number: int
    planned: float | None
    """Planned time of sending; None in a closed loop."""
    sent: float
    ended: float = 0.0
    outcome: Outcome = "unfinished"
    message: str = ""
    prompt_tokens: int = 0
    """The server's count, or the number of tokens sent."""
    asked_tokens: int = 0
    output_tokens: int = 0
    counted: Counted = "chunks"
    """Source of ``output_tokens``, the first available: usage, ids in the chunks, or the number of chunks."""
    finish_reason: str | None = None
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each chunk with output."""
    last: float = 0.0
    """Arrival time of the last output: the last of ``arrivals``, or the end if a token without text came
    then."""

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first output; None without output."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first token; None for fewer than two tokens."""
        if not self.arrivals or self.output_tokens < 2:
            return None
        return (self.last - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between neighbouring chunks with output."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last output; to the end of the stream without output."""
        return (self.last if self.arrivals else self.ended) - self.sent


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _RecordedChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def has_output(self) -> bool:
        """Return True if the chunk has text, token ids, reasoning or calls."""
        if self.text or self.token_ids:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_RecordedChoice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)


def read_stream(record: RequestRecord, lines: Sequence[tuple[float, bytes]]) -> None:
    """Fill ``record`` from the lines of an event stream, each with its arrival time.

    The outcome is "ok", or a kind of failure with a message.
    """
    done = False
    ids = 0
    usage: _Usage | None = None
    last: float | None = None
    for at, line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        try:
            chunk = _CHUNK.decode(data)
        except msgspec.MsgspecError:
            record.outcome, record.message = "protocol", "a chunk of the stream does not follow the API"
            return
        if chunk.error is not None:
            record.outcome, record.message = "stream_error", str(chunk.error)[:200]
            return
        usage = chunk.usage or usage
        for choice in chunk.choices:
            record.finish_reason = choice.finish_reason or record.finish_reason
            ids += len(choice.token_ids or ())
            # A final chunk may have a token without text, so remember the time of the finish reason.
            if choice.has_output():
                record.arrivals.append(at)
            elif choice.finish_reason:
                last = at
    _count(record, usage, ids, last)
    if record.finish_reason is None or not done:
        record.outcome, record.message = "broken", "the stream ended before the answer was complete"
    elif not record.output_tokens or not record.arrivals:
        record.outcome, record.message = "protocol", "the answer has no output"
    else:
        record.outcome = "ok"


def _count(record: RequestRecord, usage: _Usage | None, ids: int, last: float | None) -> None:
    """Set the numbers of tokens in ``record``, from the usage, the token ids or the chunks, and the last
    arrival.
    """
    if usage is not None and usage.completion_tokens is not None:
        record.output_tokens, record.counted = usage.completion_tokens, "usage"
        record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
    elif ids:
        record.output_tokens, record.counted = ids, "token_ids"
    else:
        record.output_tokens, record.counted = len(record.arrivals), "chunks"
    if last is not None and record.output_tokens > len(record.arrivals):
        # More tokens than chunks with text: the last token may have come together with the finish reason.
        record.arrivals = record.arrivals or [last]
        record.last = last
    elif record.arrivals:
        record.last = record.arrivals[-1]
