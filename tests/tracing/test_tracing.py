"""Spans: names, format, and the merged files of a run."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from weft.common.errors import ConfigError
from weft.tracing import writer as writing
from weft.tracing.merge_traces import chrome_trace, read_folder, read_steps
from weft.tracing.slowest import rows, table
from weft.tracing.trace_spans import MAX_EVENTS, Span, SpanContext, child_of, parse_traceparent
from weft.tracing.writer import SUFFIX, SpanWriter

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_traceparent_is_read_back() -> None:
    context = SpanContext.root()
    assert parse_traceparent(context.traceparent()) == context
    unsampled = parse_traceparent(f" 00-{TRACE}-{SPAN}-00 ")
    assert unsampled == SpanContext(TRACE, SPAN, 0)
    assert unsampled.child().traceparent().endswith("-00"), "the engines get the client's flags"
    assert [SpanContext(TRACE, SPAN, flags).sampled for flags in (0, 1, 2, 3)] == [False, True, False, True]
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes-later") == SpanContext(TRACE, SPAN)
    child = context.child()
    assert (child.trace, child.span != context.span) == (context.trace, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 300,
    ],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


@pytest.mark.requirement("E23")
def test_lines_are_otlp(tmp_path: Path) -> None:
    writer = SpanWriter(str(tmp_path / "new"), "front a/b")
    root = Span("request", SpanContext(TRACE, SPAN), "", time.monotonic(), {"weft.kind": "chat"})
    part = child_of(root.context, "placement", root.start, attempt=0, share=0.5)
    part.mark("first token", root.start + 0.25)
    writer.write(part, root.start + 0.5)
    writer.write(root, root.start + 1.0, "overloaded")
    writer.close()
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == f"front-a-b.{os.getpid()}{SUFFIX}"
    spans = []
    for line in file.read_text().splitlines():
        (resource,) = json.loads(line)["resourceSpans"]
        keys = [pair["key"] for pair in resource["resource"]["attributes"]]
        assert keys == ["service.name", "service.instance.id", "process.pid"]
        spans += resource["scopeSpans"][0]["spans"]
    first, second = spans
    began = int(second["startTimeUnixNano"])
    assert abs(began - time.time_ns()) < 60e9
    assert int(second["endTimeUnixNano"]) - began == pytest.approx(1e9, abs=1e3)
    assert second["status"] == {"code": 2, "message": "overloaded"}
    assert (second["traceId"], second["spanId"], second["parentSpanId"]) == (TRACE, SPAN, "")
    assert (first["traceId"], first["parentSpanId"]) == (TRACE, SPAN)
    assert first["attributes"] == [
        {"key": "weft.attempt", "value": {"intValue": "0"}},
        {"key": "weft.share", "value": {"doubleValue": 0.5}},
    ]
    (event,) = first["events"]
    assert event["name"] == "first token"
    assert int(event["timeUnixNano"]) - began == pytest.approx(0.25e9, abs=1e3)
    assert "status" not in first


def test_memory_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writing, "MOST_WAITING", 3)
    monkeypatch.setattr(writing, "EVERY_S", 60.0)
    writer = SpanWriter(str(tmp_path), "head")
    span = child_of(SpanContext.root(), "queue", 0.0)
    for number in range(MAX_EVENTS + 9):
        span.mark("again", float(number))
    assert len(span.events) == MAX_EVENTS
    for _ in range(5):
        writer.write(span, 1.0)
    assert writer.dropped == 2
    writer.close()
    writer.write(span, 1.0)  # too late
    assert writer.dropped == 3
    assert len(read_folder(tmp_path)[0]) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_trace_only(tmp_path: Path, caplog: Any) -> None:
    writer = SpanWriter(str(tmp_path), "head")
    assert writer._file is not None
    writer._file.close()
    writer._file = open("/dev/full", "wb")  # noqa: SIM115
    writer.write(child_of(SpanContext.root(), "queue", 0.0), 1.0)
    writer.close()
    assert writer.dropped == 1


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--trace-requests"):
        SpanWriter(str(tmp_path / "file"), "head")


def pair_of_engines(folder: Path) -> None:
    """Write a request that was prefilled at one engine and decoded at another, and a short request beside
    it."""
    folder.mkdir(exist_ok=True)
    front, prefill, decode = (SpanWriter(str(folder), name) for name in ("front", "prefill0", "decode0"))
    request = Span("request", SpanContext(TRACE, SPAN), "", 10.0, {"weft.output_tokens": 7})
    request.mark("submitted", 10.1)
    places = [
        child_of(request.context, "placement", 10.1, sequence="a", attempt=0, part=part)
        for part in ("prefill", "decode")
    ]
    for process, place, stages in (
        (prefill, places[0], (("queue", 10.1, 10.4), ("prefill", 10.4, 11.4), ("send", 10.1, 11.5))),
        (decode, places[1], (("await", 10.2, 11.5), ("queue", 11.5, 11.6), ("decode", 11.6, 13.6))),
    ):
        for name, start, end in stages:
            span = child_of(place.context, name, start, sequence="a", attempt=0)
            process.write(span, end)
    front.write(places[0], 11.4)
    front.write(places[1], 13.6)
    front.write(request, 13.7)
    front.write(Span("request", SpanContext.root(), "", 10.5), 10.6, "overloaded")
    for writer in (front, prefill, decode):
        writer.close()


@pytest.mark.requirement("E23")
def test_files_of_a_run_become_one_trace(tmp_path: Path) -> None:
    pair_of_engines(tmp_path)
    with next(tmp_path.glob("decode0*")).open("a") as file:
        file.write('{"resourceSpans": [{"resou')
    spans, bad = read_folder(tmp_path)
    assert (len(spans), bad) == (10, 1)
    steps = {
        "steps.json": [{"name": "step", "cat": "step", "ph": "X", "ts": 5, "dur": 2, "pid": 0, "tid": 1}]
    }
    events = chrome_trace(spans, steps)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [re.sub(r" \(\d+\)$", "", name) for name in names] == [
        "front",
        "prefill0",
        "decode0",
        "steps.json: steps",
    ]
    arrows = [event for event in events if event.get("cat") == "submit"]
    assert [arrow["ph"] for arrow in arrows] == ["s", "f", "s", "f"]
    assert {arrow["pid"] for arrow in arrows if arrow["ph"] == "f"} == {2, 3}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "request":
            nanoseconds = round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))
            tracks.setdefault((event["pid"], event["tid"]), []).append(nanoseconds)
    for on_track in tracks.values():  # side by side, or one within the other
        for i, (start, end) in enumerate(on_track):
            for other_start, other_end in on_track[i + 1 :]:
                apart = other_start >= end or other_end <= start
                assert apart or (other_start >= start and other_end <= end)


@pytest.mark.requirement("E23")
def test_the_table_says_where_time_went(tmp_path: Path) -> None:
    pair_of_engines(tmp_path)
    slow, fast = rows(read_folder(tmp_path)[0])
    expected = {"read": 0.1, "queue": 0.3, "prefill": 1.0, "transfer": 0.1, "slot": 0.1, "decode": 2.0}
    assert dict(slow.stages) == pytest.approx(expected, abs=1e-6)
    assert (slow.total, slow.attempts, slow.tokens) == (pytest.approx(3.7), 1, 7)
    assert (fast.error, fast.attempts) == ("overloaded", 0)
    lines = table([slow, fast]).splitlines()
    assert [len(line.split()) for line in lines] == [12, 12, 12]
    assert lines[2].endswith("overloaded")


def test_the_table_counts_the_attempts_of_the_slowest_choice(tmp_path: Path) -> None:
    writer = SpanWriter(tmp_path, "front")
    request = Span("request", SpanContext.root(), "", 10.0)
    for sequence, attempts in (("a", 2), ("b", 3), ("c", 1)):
        for attempt in range(attempts):
            names = {"sequence": sequence, "attempt": attempt}
            place = child_of(request.context, "placement", 10.0, **names, choice=0, instance="u", part="all")
            writer.write(child_of(place.context, "decode", 10.0, **names), 11.0)
            writer.write(place, 11.0)
    writer.write(request, 14.0)
    writer.close()
    (row,) = rows(read_folder(tmp_path)[0])
    assert (row.attempts, row.stages["decode"]) == (3, pytest.approx(3.0))


def test_step_traces_beside(tmp_path: Path) -> None:
    step = {"name": "step 1/2 + 0/0", "cat": "step", "ph": "X", "ts": 1, "dur": 2, "pid": 0, "tid": 0}
    origin = {"name": "weft_origin", "ph": "M", "pid": 0, "args": {"unix_ns": 7}}
    (tmp_path / "whole.json").write_text(json.dumps([origin, step]))
    (tmp_path / "cut.json").write_text(
        "[\n" + json.dumps(origin) + ",\n" + json.dumps(step) + ',\n{"name": "st'
    )
    (tmp_path / "merged.json").write_text(json.dumps([step]))  # without an origin
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "bad.json").write_text("]")
    found = read_steps(tmp_path)
    assert {name: len(events) for name, events in found.items()} == {"cut.json": 2, "whole.json": 2}


def test_a_folder_without_spans(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace-requests"):
        read_folder(tmp_path)
