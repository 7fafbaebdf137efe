"""Merge the spans of all processes of a run into one Chrome trace (Perfetto).

Each weft process is a process of the trace. Each request has a track per process, or several tracks for
overlapping spans. Arrows lead from a request's placements in the API server to the work in the engine
processes.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError
from weft.tracing.writer import SUFFIX


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A written span. Times are nanoseconds since 1970."""

    process: str
    pid: int
    name: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, int]]
    error: str | None

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


def read_folder(folder: Path) -> tuple[list[ReadSpan], int]:
    """Return (spans by start, number of incomplete lines, left by killed processes).

    Raises ConfigError if the folder has no span files.
    """
    files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"{folder} has no *{SUFFIX} files: give the folder of --trace-requests")
    spans, bad = list[ReadSpan](), 0
    for file in files:
        for line in file.read_bytes().splitlines():
            try:
                spans += _spans_of(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                bad += 1
    return sorted(spans, key=lambda span: span.start), bad


def _spans_of(line: Mapping[str, Any]) -> list[ReadSpan]:
    """Return the spans of one line of a file. Raises KeyError, ValueError or TypeError for another form."""
    found = []
    for resource in line["resourceSpans"]:
        about = _attributes(resource["resource"]["attributes"])
        process, pid = str(about["service.instance.id"]), int(about["process.pid"])
        for scope in resource["scopeSpans"]:
            found += [_span_of(process, pid, span) for span in scope["spans"]]
    return found


def _span_of(process: str, pid: int, span: Mapping[str, Any]) -> ReadSpan:
    """Return a span of the OTLP form. Raises KeyError or ValueError for another form."""
    status = span.get("status", {})
    return ReadSpan(
        process=process,
        pid=pid,
        name=span["name"],
        trace=span["traceId"],
        span=span["spanId"],
        parent=span.get("parentSpanId", ""),
        start=int(span["startTimeUnixNano"]),
        end=int(span["endTimeUnixNano"]),
        attributes=_attributes(span.get("attributes", [])),
        events=[(event["name"], int(event["timeUnixNano"])) for event in span.get("events", [])],
        error=str(status.get("message", "")) if status.get("code") == 2 else None,
    )


def _attributes(pairs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return OTLP attributes as a dict, whole numbers as int."""
    made = dict[str, Any]()
    for pair in pairs:
        ((kind, value),) = pair["value"].items()
        made[pair["key"]] = int(value) if kind == "intValue" else value
    return made


def chrome_trace(
    spans: Sequence[ReadSpan], steps: Mapping[str, Sequence[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return events for Perfetto.

    ``steps``: contents of --trace files by file name. The origin in a file gives the start time of its
    events. A file without an origin starts at the first span.
    """
    if not spans:
        return []
    first = min(span.start for span in spans)
    origin = min([first, *(_origin_of(events, first) for events in steps.values())])
    tracks = _Tracks()
    events = list[dict[str, Any]]()
    # Placements by span id, as starts of arrows.
    places: dict[str, tuple[dict[str, Any], ReadSpan]] = {}
    for span in spans:
        place = tracks.place(span)
        args = {**span.attributes, "trace": span.trace}
        if span.error is not None:
            args["error"] = span.error
        events.append(
            {"name": span.name, "cat": "request", "ph": "X", **place, "ts": _micros(span.start - origin)}
            | {"dur": _micros(span.end - span.start), "args": args}
        )
        for name, when in span.events:
            mark = {"name": name, "cat": "request", "ph": "i", "s": "t", **place}
            events.append({**mark, "ts": _micros(when - origin)})
        if span.name == "placement":
            places[span.span] = (place, span)
    # All placements are known now. Each placement gets one arrow, to the first child.
    for span in spans:
        if span.parent in places and span.name in ("queue", "await", "await images"):
            (there, cause), here = places.pop(span.parent), tracks.place(span)
            arrow = {"name": "submit", "cat": "submit", "id": int(span.span[:12], 16)}
            events.append({**arrow, "ph": "s", **there, "ts": _micros(cause.start - origin)})
            events.append({**arrow, "ph": "f", "bp": "e", **here, "ts": _micros(span.start - origin)})
    return [*tracks.names(), *events, *_steps(steps, first, origin, tracks.processes)]


class _Tracks:
    """Assigns numbers to processes and tracks. Spans on one track are disjoint or nested."""

    def __init__(self) -> None:
        """``processes``: (process, pid) -> number in the trace, from 1."""
        self.processes: dict[tuple[str, int], int] = {}
        self._tracks: dict[tuple[int, str], dict[int, list[ReadSpan]]] = defaultdict(dict)
        """(process, trace) -> track -> stack of open spans, each nested in the previous one."""
        self._used: dict[int, int] = defaultdict(int)
        """Number of tracks of each process."""
        self._places: dict[str, dict[str, int]] = {}

    def place(self, span: ReadSpan) -> dict[str, int]:
        """Return {pid, tid} of a span, in the trace's numbers.

        A new span gets the first track with room, or a new track. Call in order of start.
        """
        if (known := self._places.get(span.span)) is not None:
            return known
        number = self.processes.setdefault((span.process, span.pid), len(self.processes) + 1)
        tracks = self._tracks[number, span.trace]
        found = -1
        # A span fits on a track without open spans, or inside the innermost open span.
        for tid, stack in tracks.items():
            while stack and stack[-1].end <= span.start:
                stack.pop()
            if not stack or stack[-1].end >= span.end:
                found = tid
                break
        if found < 0:
            found = self._used[number]
            self._used[number] += 1
        tracks.setdefault(found, []).append(span)
        self._places[span.span] = {"pid": number, "tid": found}
        return self._places[span.span]

    def names(self) -> list[dict[str, Any]]:
        """Return the events with the names of processes and tracks."""
        named = [
            {"name": "process_name", "ph": "M", "pid": number, "args": {"name": f"{name} ({pid})"}}
            for (name, pid), number in self.processes.items()
        ]
        for (number, trace), tracks in self._tracks.items():
            for tid in tracks:
                about = {"name": f"request {trace[:8]}"}
                named.append({"name": "thread_name", "ph": "M", "pid": number, "tid": tid, "args": about})
        return named


def _steps(
    files: Mapping[str, Sequence[dict[str, Any]]], first: int, origin: int, used: Mapping[Any, int]
) -> list[dict[str, Any]]:
    """Return the events of step traces as separate processes.

    ``first``: start time of files without an origin.
    """
    made = list[dict[str, Any]]()
    base = len(used) + 1
    for file, events in files.items():
        began = _origin_of(events, first)
        pids = sorted({int(event.get("pid", 0)) for event in events})
        for pid in pids:
            about = {"name": f"{file}: {'steps' if pid == 0 else 'micro-batches'}"}
            number = base + pids.index(pid)
            made.append({"name": "process_name", "ph": "M", "pid": number, "args": about})
        for event in events:
            if event.get("name") in ("weft_origin", "process_name"):
                continue
            moved = {**event, "pid": base + pids.index(int(event.get("pid", 0)))}
            if "ts" in event:
                moved["ts"] = event["ts"] + _micros(began - origin)
            made.append(moved)
        base += len(pids)
    return made


def _origin_of(events: Sequence[dict[str, Any]], default: int) -> int:
    """Return the origin of a step trace in nanoseconds; ``default`` without an origin."""
    return next((int(event["args"]["unix_ns"]) for event in events if _is_origin(event)), default)


def _micros(nanos: int) -> float:
    return nanos / 1e3


def _is_origin(event: Any) -> bool:
    """Return True for the event with a step trace's start time. A merged file has no such event."""
    return isinstance(event, dict) and event.get("name") == "weft_origin"


def read_steps(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events of the step traces (``--trace``) in ``folder`` by file name, including traces of
    killed processes. Other files are skipped.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if (events := _events_of(text)) and _is_origin(events[0]):
            found[file.name] = events
    return found


def _events_of(text: str) -> list[Any]:
    """Return the events of a Chrome trace; for a truncated trace, the events on complete lines.

    Empty for other JSON.
    """
    try:
        events = json.loads(text)
        return events if isinstance(events, list) else []
    except ValueError:
        pass
    events = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            events.append(json.loads(line.strip(" ,[]")))
    return events
