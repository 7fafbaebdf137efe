"""Spans that are pushed to a collector over OTLP/HTTP."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import ROOT, Servers
from tests.support.slowness import deadline
from weft.cli.main import main
from weft.common import env
from weft.common.errors import ConfigError
from weft.front.monitoring.request_trace import RequestTrace
from weft.tracing import push as pushing
from weft.tracing import writer as writing
from weft.tracing.merge_traces import read_folder
from weft.tracing.push import SpanPush, check_endpoint, endpoint_of, open_push, shown
from weft.tracing.trace_spans import Span, SpanContext, child_of
from weft.tracing.writer import SpanWriter, open_writer


def have_packages() -> bool:
    try:
        pushing.check_packages()
    except ConfigError:
        return False
    return True


packages = pytest.mark.skipif(
    not have_packages(), reason="needs the extra otel (opentelemetry-sdk and its exporter)"
)
TRACE, SPAN, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"


class Collector:
    """An OTLP/HTTP collector on a loopback port. ``status`` answers all requests; ``go`` and ``delay`` come
    before."""

    def __init__(self) -> None:
        self.status, self.delay, self.go = 200, 0.0, threading.Event()
        self.go.set()
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.go.wait(deadline(60))
                time.sleep(collector.delay)
                collector.take(self.path, dict(self.headers), body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.paths.append(path)
        self.headers.append({name.lower(): value for name, value in headers.items()})
        if self.status != 200:
            return
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({pair.key: _plain(pair.value) for pair in resource.resource.attributes})
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    with made.scope():
        yield made


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the warnings that ``weft.tracing.push`` logs."""
    found: list[str] = []
    monkeypatch.setattr(pushing.log, "warning", lambda text, *values: found.append(text % values))
    return found


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in env.child_environment() if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def spans() -> tuple[Span, Span]:
    """Return a request's span, below a client's span, and a failed placement inside the request."""
    root = Span("request", SpanContext(TRACE, SPAN), CLIENT, time.monotonic(), {"weft.kind": "chat"})
    part = child_of(root.context, "placement", root.start, attempt=0, share=0.5)
    part.mark("first token", root.start + 0.25)
    return root, part


@packages
@pytest.mark.requirement("E23")
def test_the_collector_gets_the_spans_of_the_file(collector: Collector, tmp_path: Path) -> None:
    writer = open_writer(str(tmp_path), "front", collector.url)
    assert writer is not None
    root, part = spans()
    writer.write(part, root.start + 0.5, "lost")
    writer.write(root, root.start + 1.0)
    writer.close()
    assert (writer.dropped, collector.paths) == (0, ["/v1/traces"])
    (resource,) = collector.resources
    assert resource["service.name"] == "weft"
    assert resource["service.instance.id"] == "front"
    assert resource["process.pid"] == os.getpid()
    second, first = collector.spans
    assert (first.name, second.name) == ("request", "placement")
    assert (first.trace_id.hex(), first.span_id.hex(), first.parent_span_id.hex()) == (TRACE, SPAN, CLIENT)
    assert (second.trace_id.hex(), second.parent_span_id.hex()) == (TRACE, SPAN)
    assert (first.kind, second.kind) == (2, 1)
    assert (first.status.code, second.status.code, second.status.message) == (0, 2, "lost")
    attributes = {pair.key: _plain(pair.value) for pair in second.attributes}
    assert attributes == {"weft.attempt": 0, "weft.share": 0.5}
    (event,) = second.events
    assert event.name == "first token"
    filed, _ = read_folder(tmp_path)
    for one in collector.spans:
        (same,) = [span for span in filed if span.span == one.span_id.hex()]
        assert (same.start, same.end) == (one.start_time_unix_nano, one.end_time_unix_nano)


@packages
def test_variables_of_opentelemetry(collector: Collector, monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-backend")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    writer = open_writer(None, "decode0")
    assert writer is not None
    writer.write(spans()[0], time.monotonic())
    writer.close()
    assert collector.paths == ["/v1/traces"]
    assert collector.headers[0]["x-tenant"] == "blue"
    assert collector.resources[0]["service.name"] == "chat-backend"
    assert collector.resources[0]["deployment.environment"] == "test"


@packages
def test_a_trace_that_the_caller_does_not_sample_is_only_filed(collector: Collector, tmp_path: Path) -> None:
    writer = open_writer(str(tmp_path), "front", collector.url)
    assert writer is not None
    for flags in ("00", "01", "03"):
        trace = RequestTrace(writer, "chat", f"00-{TRACE}-{CLIENT}-{flags}")
        assert trace.context.traceparent().endswith(f"-{flags}")
        trace.end()
    writer.close()
    assert writer.dropped == 0
    assert len(collector.spans) == 2
    assert len(read_folder(tmp_path)[0]) == 3


@pytest.mark.parametrize(
    ("name", "value", "pushed"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", False),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", True),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", False),
        ("OTEL_TRACES_EXPORTER", "none", False),
        ("OTEL_TRACES_EXPORTER", "otlp", True),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://[::1:4318", False),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c:99999/v1/traces", False),
    ],
)
def test_variables_against_a_push(
    name: str, value: str, pushed: bool, monkeypatch: Any, warnings: list[str]
) -> None:
    """Wrong variables cost a warning; the flag does not depend on the variables."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://base:4318")
    monkeypatch.setenv(name, value)
    assert (endpoint_of(None) is not None) is pushed
    assert ["no spans are pushed" in text for text in warnings] == ([] if pushed else [True])
    assert endpoint_of("http://flag:1") == "http://flag:1/v1/traces"
    if name == "OTEL_EXPORTER_OTLP_PROTOCOL":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        assert endpoint_of(None) is not None


def test_the_url(monkeypatch: Any) -> None:
    assert endpoint_of(None) is None
    assert endpoint_of("http://c:4318") == endpoint_of("http://c:4318/") == "http://c:4318/v1/traces"
    assert endpoint_of("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://base:4318/")
    assert endpoint_of(None) == "http://base:4318/v1/traces"
    assert endpoint_of("http://flag:1") == "http://flag:1/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://exact:4318/x")
    assert endpoint_of(None) == "http://exact:4318/x"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert endpoint_of(None) is None
    assert shown("http://user:secret@c:1/v1/traces?key=secret") == "http://c:1/v1/traces"


@packages
def test_a_failing_collector_costs_spans_only(collector: Collector, warnings: list[str]) -> None:
    collector.status = 400  # an error after which the exporter does not try again
    push = SpanPush(collector.url + "/v1/traces", "front")
    root, part = spans()
    for expected in (2, 4):
        push.take([root, part], 0)
        push._wake.set()
        until = time.monotonic() + deadline(20)
        while push.dropped < expected and time.monotonic() < until:
            time.sleep(0.01)
    push.close(deadline(20))
    assert push.dropped == 4
    (warning,) = warnings  # one for the whole outage
    assert "spans do not reach" in warning
    assert "400" in warning


@packages
def test_the_reason_of_an_absent_collector_is_logged(warnings: list[str]) -> None:
    push = SpanPush("http://127.0.0.1:9/v1/traces", "front")
    push.take(list(spans()), 0)
    push.close(0.3)  # the exporter tries again for longer
    push._thread.join(deadline(10))
    assert push.dropped == 2
    assert "refused" in warnings[0]


@packages
def test_the_queue_is_bounded_and_never_waits(collector: Collector, monkeypatch: Any) -> None:
    monkeypatch.setattr(pushing, "MOST_WAITING", 8)
    monkeypatch.setattr(pushing, "BATCH", 4)
    collector.go.clear()
    push = SpanPush(collector.url + "/v1/traces", "front")
    root, _ = spans()
    for _ in range(100):
        push.take([root], 0)
    assert collector.spans == [], "a full queue waits for no answer"
    collector.go.set()
    push.close(deadline(20))
    assert push.dropped + len(collector.spans) == 100
    assert 8 <= len(collector.spans) <= 16
    push.take([root], 0)  # too late
    assert push.dropped + len(collector.spans) == 101


@packages
def test_the_end_has_a_deadline(collector: Collector, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writing, "PUSH_CLOSE_S", 0.3)
    collector.delay = 30.0
    writer = SpanWriter(str(tmp_path), "front", open_push(collector.url, "front"))
    for _ in range(600):  # one batch is on its way, the rest waits
        writer.write(spans()[0], time.monotonic())
    start = time.monotonic()
    writer.close()
    assert time.monotonic() - start < deadline(5)
    assert writer.dropped == 600 - pushing.BATCH
    assert len(read_folder(tmp_path)[0]) == 600, "the file has all spans"


@pytest.mark.slow
@packages
def test_a_server_pushes_the_spans_of_all_processes(
    collector: Collector, servers: Servers, tmp_path: Path
) -> None:
    path = os.pathsep.join(
        [str(ROOT), *filter(None, env.child_environment().get("PYTHONPATH", "").split(":"))]
    )
    flags = ("--threads", "1", "--otlp-traces-endpoint", collector.url)
    server = servers.weft(*flags, PYTHONPATH=path)
    header = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
    body = {"model": server.model, "prompt": "Tom", "max_tokens": 4}
    assert server.http.post("/v1/completions", json=body, headers=header).status_code == 200
    server.wait(lambda: {"request", "placement", "decode"} <= {one.name for one in collector.spans}, 20)
    assert server.metric("front_spans_dropped_total") == server.metric("engine_spans_dropped_total") == 0
    body["prompt"] = "the last request"
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert server.stop() == 0
    mine = [one for one in collector.spans if one.trace_id.hex() == TRACE]
    (request,) = [one for one in mine if one.name == "request"]
    assert request.parent_span_id.hex() == CLIENT
    assert {one.name for one in mine} == {"request", "placement", "queue", "prefill", "decode"}
    assert len([one for one in collector.spans if one.name == "request"]) == 2, "the end sends the rest"
    names = {resource["service.instance.id"] for resource in collector.resources}
    assert len(names) == 2


def test_missing_packages_are_named(monkeypatch: Any, warnings: list[str], capsys: Any) -> None:
    monkeypatch.setattr(pushing, "_EXPORTER", "opentelemetry.exporter.nowhere.at_all")
    with pytest.raises(ConfigError, match=r"pip install 'weft\[otel\]'"):
        open_writer(None, "front", "http://127.0.0.1:4318")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "spool-text", "--otlp-traces-endpoint", "http://127.0.0.1:4318"])
    assert ended.value.code == 2
    assert "weft[otel]" in capsys.readouterr().err
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert open_writer(None, "front") is None, "a variable alone ends no server"
    assert "no spans are pushed" in warnings[0]


@pytest.mark.parametrize(
    "wrong",
    [
        "127.0.0.1:4318",
        "grpc://collector:4317",
        "http://",
        "file:///tmp/x",
        "http://[::1:4318",
        "http://c:99999",
        "http://c:0",
        "http://c:port",
    ],
)
def test_wrong_urls(wrong: str) -> None:
    for check in (check_endpoint, lambda url: open_push(url, "front")):
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be"):
            check(wrong)


def test_no_package_is_imported_without_a_push() -> None:
    program = "import sys, weft.tracing.writer; sys.exit('opentelemetry.sdk' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
