"""Push of spans to an OpenTelemetry collector, over OTLP/HTTP.

``SpanPush`` gets finished spans from the ``SpanWriter`` of the process. A thread converts and sends the
spans, so that no caller waits for the network. If the collector is slow or unreachable, spans are dropped and
counted. The packages of the extra ``otel`` encode and send. Their environment variables apply
(OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES and others).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from weft.common import env
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.tracing.trace_spans import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = get_logger(__name__)

FLAG = "--otlp-traces-endpoint"
PATH = "/v1/traces"
"""Path for traces at a collector, added to a URL without a path."""
MOST_WAITING = 8192
"""Maximum spans that wait for the collector."""
BATCH = 128
"""Maximum spans of one HTTP request. The conversion of a batch holds the GIL for about 3 ms."""
EVERY_S = 1.0
"""Seconds between two requests. A full batch is sent at once."""
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_SERVICE = "service.name"
_PROTOCOL = "http/protobuf"


class SpanPush:
    """Sink of one process's spans: a bounded queue and a thread that sends the spans to ``endpoint``."""

    def __init__(self, endpoint: str, process: str) -> None:
        """``endpoint``: URL with a path. ``process``: name of the process in each span. Raise ConfigError
        without the packages of the extra ``otel``."""
        check_packages()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._endpoint = endpoint
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        resource = Resource.create({"service.instance.id": process, "process.pid": os.getpid()})
        if str(resource.attributes.get(_SERVICE, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({_SERVICE: "weft"}))
        self._resource = resource
        self._scope = InstrumentationScope("weft")
        self._reason = _Reason.installed()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Span, int]] = deque()
        """Spans, each with the wall-clock time of time 0 of the span's clock, in nanoseconds."""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._failing = False
        self.dropped = 0
        """Number of spans that did not reach the collector."""
        self._thread = threading.Thread(target=self._run, name="weft-otlp", daemon=True)
        self._thread.start()

    def take(self, spans: Sequence[Span], origin: int) -> None:
        """Queue finished spans; drop and count the spans above the limit. Ignore spans of traces that the
        caller does not sample. ``origin``: nanoseconds since 1970 at time 0 of the spans' clock."""
        spans = [span for span in spans if span.context.sampled]
        with self._lock:
            room = 0 if self._closing.is_set() else MOST_WAITING - len(self._waiting)
            self._waiting.extend((span, origin) for span in spans[:room])
            self.dropped += len(spans) - min(room, len(spans))
            if len(self._waiting) >= BATCH:
                self._wake.set()

    def close(self, seconds: float) -> None:
        """Send the queued spans for at most ``seconds``, and end the thread. Remaining spans count as
        dropped. Idempotent."""
        self._closing.set()
        self._wake.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            exporter: Any = self._exporter
            exporter.shutdown()  # interrupts the pauses between attempts
        with self._lock:
            self.dropped += len(self._waiting)
            self._waiting.clear()

    def _run(self) -> None:
        """Send batches until ``close``, then the rest until an attempt fails."""
        while not self._closing.is_set():
            self._wake.wait(EVERY_S)
            self._wake.clear()
            while self._send() and len(self._waiting) >= BATCH:
                pass
        while self._waiting and self._send():
            pass

    def _send(self) -> bool:
        """Send one batch, if spans wait. Return False after a failure; the spans of the batch are dropped."""
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH))]
        if not batch:
            return True
        self._reason.text = ""
        try:
            result = self._exporter.export([self._converted(span, origin) for span, origin in batch])
            sent = bool(result.value == 0)  # SpanExportResult.SUCCESS
        except Exception as error:
            self._reason.text, sent = type(error).__name__, False
        if not sent:
            with self._lock:
                self.dropped += len(batch)
        if sent is self._failing:  # the first failure, or the first success after failures
            self._failing = not sent
            if sent:
                log.info("%s: spans reach the collector again", FLAG)
            else:
                reason = self._reason.text or "no reason given"
                log.warning("%s: spans do not reach %s: %s", FLAG, shown(self._endpoint), reason)
        return sent

    def _converted(self, span: Span, origin: int) -> ReadableSpan:
        """Return ``span`` in the form of the SDK, with times in nanoseconds since 1970."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import Event, ReadableSpan

        ids = int(span.context.trace, 16), int(span.context.span, 16)
        flags = trace.TraceFlags(span.context.flags)
        parent = None
        if span.parent:
            remote = span.name == "request"  # the parent is the client's span
            parent = trace.SpanContext(ids[0], int(span.parent, 16), remote, flags)
        status = trace.Status(trace.StatusCode.UNSET)
        if span.error is not None:
            status = trace.Status(trace.StatusCode.ERROR, span.error)
        return ReadableSpan(
            name=span.name,
            context=trace.SpanContext(*ids, is_remote=False, trace_flags=flags),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, timestamp=_nanos(when, origin)) for name, when in span.events],
            kind=trace.SpanKind.SERVER if span.name == "request" else trace.SpanKind.INTERNAL,
            status=status,
            start_time=_nanos(span.start, origin),
            end_time=_nanos(max(span.end, span.start), origin),
            instrumentation_scope=self._scope,
        )


class _Reason(logging.Handler):
    """Stores the first message of the exporter about a batch, instead of logging all messages."""

    text = ""

    @classmethod
    def installed(cls) -> _Reason:
        """Return the only handler of the exporter's logger. Installs the handler at the first call."""
        logger = logging.getLogger(_EXPORTER)
        for handler in logger.handlers:
            if isinstance(handler, cls):
                return handler
        made = cls()
        logger.handlers, logger.propagate = [made], False
        return made

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or " ".join(record.getMessage().split())[:400]


def check_packages() -> None:
    """Raise ConfigError unless the packages of the extra ``otel`` are installed."""
    try:
        found = importlib.util.find_spec(_EXPORTER) and importlib.util.find_spec("opentelemetry.sdk.trace")
    except ImportError:
        found = None
    if not found:
        raise ConfigError(
            f"{FLAG}: the OpenTelemetry packages are not installed: pip install 'weft[otel]'", param=FLAG
        )


def check_endpoint(url: str) -> None:
    """Raise ConfigError unless ``url`` is an http(s) URL and the packages of the extra ``otel`` exist."""
    if not _is_http(url):
        raise ConfigError(
            f"{FLAG} must be the URL of an OTLP/HTTP collector, e.g. http://127.0.0.1:4318", param=FLAG
        )
    check_packages()


def _is_http(url: str) -> bool:
    """Return True for an http(s) URL with a host and, if any, a port from 1 to 65535."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an open bracket, or a port out of range
        return False


def endpoint_of(flag: str | None) -> str | None:
    """Return the URL for spans; None for no push.

    ``flag``: value of the flag, which takes precedence over OpenTelemetry's variables. The path of traces is
    added to a URL without a path. The variables are ignored if OTEL_SDK_DISABLED is true. They are also
    ignored, with a warning, if OTEL_TRACES_EXPORTER is none or if the protocol is not http/protobuf.
    """
    # The standard appends the path to the general endpoint only, not to the endpoint for traces.
    if flag is not None:
        return flag if urlsplit(flag).path.strip("/") else flag.rstrip("/") + PATH
    if env.get("OTEL_SDK_DISABLED").strip().lower() == "true":
        return None
    base = env.get("OTEL_EXPORTER_OTLP_ENDPOINT").strip()
    url = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").strip() or (base and base.rstrip("/") + PATH)
    reason = _reason_against(url) if url else ""
    if reason:
        log.warning("an OpenTelemetry variable names a collector, but no spans are pushed: %s", reason)
        return None
    return url or None


def _reason_against(url: str) -> str:
    """Return the reason of the environment for no push to ``url``; "" for a push."""
    if env.get("OTEL_TRACES_EXPORTER").strip().lower() == "none":
        return "OTEL_TRACES_EXPORTER is none"
    general = env.get("OTEL_EXPORTER_OTLP_PROTOCOL").strip()
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL").strip() or general
    if protocol.lower() not in ("", _PROTOCOL):
        return f"the protocol of the environment is {protocol!r}, and Weft supports only {_PROTOCOL}"
    return "" if _is_http(url) else "the URL is not of the form http://HOST:PORT"


def open_push(flag: str | None, process: str) -> SpanPush | None:
    """Return the push of a process; None for no push.

    Raise ConfigError for a wrong flag, or if the packages for the flag are missing. Errors of OpenTelemetry's
    variables are logged only, and no spans are pushed.
    """
    if flag is not None:
        check_endpoint(flag)
    endpoint = endpoint_of(flag)
    if endpoint is None:
        return None
    try:
        push = SpanPush(endpoint, process)
    except ConfigError as error:
        if flag is not None:
            raise
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but no spans are pushed: %s", error.message)
        return None
    log.info("spans of requests are pushed to %s", shown(endpoint))
    return push


def shown(url: str) -> str:
    """Return ``url`` without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _nanos(seconds: float, origin: int) -> int:
    return origin + round(seconds * 1e9)
