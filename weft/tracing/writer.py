"""Writer of one process's spans: to a file of OTLP JSON lines, to a collector, or to both.

The collector gets the same spans as the file (``weft.tracing.push``). Each line of the file is one
``TracesData``, the format of OpenTelemetry's file exporters and of the collector's receiver
(``otlpjsonfile``). ``write`` only queues a span. A thread writes the queue ten times per second. If the disk
is slow or full, spans are dropped and counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import msgspec

from weft.common.errors import ConfigError
from weft.common.folder import open_private
from weft.common.log import get_logger
from weft.tracing.push import SpanPush, open_push
from weft.tracing.trace_spans import Span, Value

log = get_logger(__name__)

SUFFIX = ".spans.jsonl"
MOST_WAITING = 8192
"""Maximum spans in the queue to the disk."""
EVERY_S = 0.1
"""Seconds between two writes. A killed process loses at most the spans of this time."""
CLOSE_S = 5.0
"""Maximum seconds of ``close`` for writing the last spans."""
PUSH_CLOSE_S = 3.0
"""Further maximum seconds of ``close`` for pushing the last spans."""


class SpanWriter:
    """Span writer of a process. ``write`` may be called from any thread."""

    def __init__(self, folder: str | None, process: str, push: SpanPush | None = None) -> None:
        """Open a file in ``folder``, which is created if missing, and start the thread.

        ``folder``: None for no file. ``process``: part of the file name and of each span. ``push``: also gets
        all spans; closed by ``close``. Raises ConfigError if the file cannot be created.
        """
        self._to_file, self._push = folder is not None, push
        self._file: IO[bytes] | None = None if folder is None else _open_file(folder, process)
        self._resource = _attributes(
            {"service.name": "weft", "service.instance.id": process, "process.pid": os.getpid()}
        )
        # Span times are monotonic, file times are wall-clock. A fixed offset keeps the order of spans.
        self._origin = time.time_ns() - time.monotonic_ns()
        self._lock = threading.Lock()
        self._waiting: list[Span] = []
        self._wake, self._closing = threading.Event(), threading.Event()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="weft-spans", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of spans not written, and of spans not pushed."""
        return self._lost + (0 if self._push is None else self._push.dropped)

    def write(self, span: Span, end: float, error: str | None = None) -> None:
        """Queue ``span``, which ended at ``end`` (seconds).

        Sets end and error of the span, which must not change afterwards. With a full queue, or after
        ``close``, the span is dropped and counted.
        """
        span.end, span.error = end, error
        with self._lock:
            if len(self._waiting) >= MOST_WAITING or self._closing.is_set():
                self._lost += 1
                return
            self._waiting.append(span)
        self._wake.set()

    def close(self) -> None:
        """Write the queued spans and end the thread; wait up to ``CLOSE_S``, and ``PUSH_CLOSE_S`` for the
        push. Safe to call twice."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._push is not None:
            self._push.close(PUSH_CLOSE_S)

    def _run(self) -> None:
        """Write queued spans every ``EVERY_S`` seconds until ``close``; then close the file and log dropped
        spans.
        """
        while not self._closing.is_set():
            self._wake.wait()
            # Collect spans for a while: one write per interval, not one per span.
            self._closing.wait(EVERY_S)
            self._wake.clear()
            self._flush()
        self._flush()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._lost:
            log.warning("request traces are incomplete: %d spans were dropped", self._lost)

    def _flush(self) -> None:
        """Write all queued spans as one line.

        After a write error, log a warning and drop all further spans.
        """
        with self._lock:
            spans, self._waiting = self._waiting, []
        if not spans:
            return
        # The push has a queue of its own, so a slow collector does not delay the file.
        if self._push is not None:
            self._push.take(spans, self._origin)
        if not self._to_file:
            return
        if self._file is None:
            self._lost += len(spans)
            return
        try:
            self._file.write(encode(spans, self._resource, self._origin) + b"\n")
            self._file.flush()
        except OSError as error:
            self._lost += len(spans)
            log.warning("--trace-requests: the file cannot be written to (%s); tracing ends", error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def encode(spans: Iterable[Span], resource: list[dict[str, Any]], origin: int) -> bytes:
    """Return one line. ``origin``: nanoseconds since 1970 at time 0 of the spans' clock."""
    scope = {"scope": {"name": "weft"}, "spans": [_otlp(span, origin) for span in spans]}
    return msgspec.json.encode(
        {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": [scope]}]}
    )


def _otlp(span: Span, origin: int) -> dict[str, Any]:
    """Return ``span`` in the OTLP form, with times in nanoseconds since 1970.

    ``origin``: nanoseconds from the monotonic to the wall clock.
    """
    made: dict[str, Any] = {
        "traceId": span.context.trace,
        "spanId": span.context.span,
        "parentSpanId": span.parent,
        "name": span.name,
        "kind": 2 if span.name == "request" else 1,  # server, internal
        "startTimeUnixNano": _nanos(span.start, origin),
        "endTimeUnixNano": _nanos(max(span.end, span.start), origin),
        "attributes": _attributes(span.attributes),
    }
    if span.events:
        made["events"] = [{"timeUnixNano": _nanos(when, origin), "name": name} for name, when in span.events]
    if span.error is not None:
        made["status"] = {"code": 2, "message": span.error}
    return made


def _nanos(seconds: float, origin: int) -> str:
    return str(origin + round(seconds * 1e9))


def _attributes(values: dict[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


def _open_file(folder: str, process: str) -> IO[bytes]:
    """Open the file of a process. Raise ConfigError if the file cannot be created."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", process) or "weft"
    path = Path(folder) / f"{safe}.{os.getpid()}{SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_private(path, "ab")
    except OSError as error:
        raise ConfigError(
            f"--trace-requests: cannot write to that folder ({error.strerror})", param="--trace-requests"
        ) from None


def open_writer(folder: str | None, process: str, endpoint: str | None = None) -> SpanWriter | None:
    """Return a writer; None if requests are not traced.

    ``folder``: of ``--trace-requests``. ``endpoint``: of ``--otlp-traces-endpoint``. Raises ConfigError like
    ``SpanWriter``, and without the packages for a push.
    """
    push = open_push(endpoint, process)
    return None if folder is None and push is None else SpanWriter(folder, process, push)
