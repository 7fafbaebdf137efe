"""``weft trace`` on the spans of a server's processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_serve import start
from tests.cli.test_up import until
from tests.support.slowness import deadline
from weft.tracing.merge_traces import ReadSpan, read_folder

__all__ = ["start"]

CALLER, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.requirement("E23")
def test_requests_of_a_pair_are_traced(start: Any, tmp_path: Path) -> None:
    """A request's spans cover the client's own span, the API server and both engines, and merge into a
    trace.
    """
    folder = tmp_path / "spans"
    folder.mkdir()
    server = start(
        "spool-text",
        *("--prefill", "1", "--decode", "1", "--max-num-seqs", "8", "--port", "0"),
        *("--trace-requests", str(folder), "--trace", str(folder / "steps.json")),
    )
    base = server.url()
    secret = "Tom has 12 apples. " * 60
    for number in range(2):
        answer = httpx.post(
            f"{base}/v1/completions",
            json={
                "model": "spool-text",
                "prompt": secret,
                "max_tokens": 9,
                "n": 2 - number,
                "temperature": 0,
            },
            headers={} if number else {"traceparent": f"00-{CALLER}-{CALLERS_SPAN}-01"},
            timeout=deadline(60),
        )
        assert answer.status_code == 200
    assert httpx.post(f"{base}/v1/completions", json={"model": "spool-text"}).status_code == 400
    until(server, lambda: counted(base, "transfer_exposed_seconds_count", "prefill0") == 3)
    for name in ("transfer_seconds_count", "transfer_size_bytes_count"):
        until(server, lambda name=name: counted(base, name, "decode0") == 3)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(deadline(60)) == 0

    spans, bad = read_folder(folder)
    assert not bad
    assert {span.process for span in spans} == {"front", "prefill0", "decode0"}
    refused, other = (
        next(s for s in spans if s.name == "request" and s.trace != CALLER and bool(s.error) is failed)
        for failed in (True, False)
    )
    assert refused.error
    assert not other.parent
    of_caller = [span for span in spans if span.trace == CALLER]
    check_pair(of_caller, sequences=2)
    check_pair([span for span in spans if span.trace == other.trace], sequences=1)
    (request,) = [span for span in of_caller if span.name == "request"]
    assert request.parent == CALLERS_SPAN
    assert [name for name, _ in request.events] == ["body is here", "submitted", "first token"]
    assert "apples" not in "".join(file.read_text() for file in folder.iterdir())
    assert {file.name for file in folder.glob("*.json")} == {"steps.decode0.json", "steps.prefill0.json"}

    merged = subprocess.run(
        [sys.executable, "-m", "weft", "trace", str(folder)], capture_output=True, text=True, check=True
    )
    assert "3 requests" in merged.stdout
    assert "transfer" in merged.stdout
    events = json.loads((folder / "trace.perfetto.json").read_text())
    assert {event["name"] for event in events} >= {
        "request",
        "placement",
        "prefill",
        "decode",
        "receive",
        "submit",
    }
    assert min(event["ts"] for event in events if "ts" in event) >= 0
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(named.values()) > {"steps.decode0.json: steps", "steps.prefill0.json: steps"}
    begun = [e for e in events if e["name"] == "prefill"]
    for span in begun:  # a step of the same time computed each span
        assert any(
            event.get("cat") == "step" and event["args"]["prefill_tokens"] and event["ts"] < ends(span)
            for event in events
            if named[event["pid"]].startswith("steps.prefill0") and ends(event) > span["ts"]
        )


def ends(event: Any) -> float:
    return float(event.get("ts", 0) + event.get("dur", 0))


def counted(base: str, name: str, engine: str) -> float:
    """Return an engine's counter as of its last heartbeat."""
    page = httpx.get(f"{base}/metrics").text
    found = re.findall(rf'^weft:{name}\{{head="{engine}",.*\}} (.*)$', page, re.MULTILINE)
    return sum(float(value) for value in found)


def check_pair(spans: list[ReadSpan], sequences: int) -> None:
    """Assert the complete set of spans of a request on a pair."""
    names = Counter((span.process, span.name) for span in spans)
    per_sequence = [
        *(("prefill0", name) for name in ("queue", "prefill", "send")),
        *(("decode0", name) for name in ("await", "queue", "decode", "receive")),
    ]
    assert names == {
        ("front", "request"): 1,
        ("front", "placement"): 2 * sequences,
        **dict.fromkeys(per_sequence, sequences),
    }
    by_id = {span.span: span for span in spans}
    (request,) = [span for span in spans if span.name == "request"]
    for span in spans:
        assert span.start <= span.end
        if span is request:
            continue
        parent = by_id[span.parent]
        assert parent.name == ("request" if span.name == "placement" else "placement")
        assert span.error is None
        slack = 50_000_000  # clocks of processes
        assert request.start - slack <= span.start
        if span.name != "placement":
            assert parent.attributes["weft.instance"] == span.process
    for span in spans:
        if span.name in ("send", "receive"):
            when = dict(span.events)
            order = ["offered", "bound", "first byte", "landed"]
            if span.name == "receive":  # the sender may get the other engine's message first
                order.insert(3, "last byte")
            assert [when[name] for name in order] == sorted(when[name] for name in order)
            assert span.attributes["weft.bytes"] > 0
    ends = Counter(s.attributes["weft.finish"] for s in spans if s.name in ("prefill", "decode"))
    assert ends == {"moved": sequences, "length": sequences}
