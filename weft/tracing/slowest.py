"""Table of the slowest requests, with the time of each stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.tracing.merge_traces import ReadSpan

# Column -> (span name, parts of a pair). The part "all" stands for a placement without a pair.
_STAGES = {
    "images": ("await images", ("all", "prefill")),
    "queue": ("queue", ("all", "prefill")),
    "prefill": ("prefill", ("all", "prefill")),
    "slot": ("queue", ("decode",)),
    "decode": ("decode", ("all", "decode")),
}
_TIMES = ("total", "read", "images", "queue", "prefill", "transfer", "slot", "decode")
COLUMNS = (*_TIMES, "tokens", "attempts", "end")


@dataclass(slots=True)
class RequestRow:
    """One row of the table, in seconds.

    With several sequences, ``attempts`` and ``stages`` belong to the sequence with the longest stages. With
    several attempts, ``stages`` is the sum over the attempts.
    """

    trace: str
    total: float
    error: str | None
    tokens: int
    attempts: int = 0
    stages: dict[str, float] = field(default_factory=dict)

    def cells(self) -> list[str]:
        times = [self.total, *(self.stages.get(name, 0.0) for name in _TIMES[1:])]
        end = "ok" if self.error is None else self.error
        return [self.trace[:8], *(f"{t:.3f}" for t in times), str(self.tokens), str(self.attempts), end]


def rows(spans: Iterable[ReadSpan]) -> list[RequestRow]:
    """Return a row for each request, the slowest first."""
    by_trace: dict[str, list[ReadSpan]] = defaultdict(list)
    for span in spans:
        by_trace[span.trace].append(span)
    made = list[RequestRow]()
    for trace, of_request in by_trace.items():
        made += [_row(trace, one, of_request) for one in of_request if one.name == "request"]
    return sorted(made, key=lambda row: -row.total)


def _row(trace: str, request: ReadSpan, spans: Sequence[ReadSpan]) -> RequestRow:
    """Return the row of one request: attempts, and the seconds of each stage."""
    parts = {one.span: one for one in spans if one.name == "placement" and one.parent == request.span}
    row = RequestRow(
        trace, request.seconds, request.error, int(request.attributes.get("weft.output_tokens", 0))
    )
    attempts: dict[str, set[int]] = defaultdict(set)
    for placement in parts.values():
        attempts[str(placement.attributes["weft.sequence"])].add(int(placement.attributes["weft.attempt"]))
    submitted = [when for name, when in request.events if name == "submitted"]
    if submitted:
        row.stages["read"] = (submitted[0] - request.start) / 1e9
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    prefill_ends: dict[tuple[str, int], int] = {}
    for one in spans:
        if one.parent not in parts:
            continue
        sequence, part = str(one.attributes["weft.sequence"]), parts[one.parent].attributes["weft.part"]
        for column, (name, of_parts) in _STAGES.items():
            if one.name == name and part in of_parts:
                sums[sequence][column] += one.seconds
        if one.name == "prefill" and part == "prefill":
            prefill_ends[sequence, int(one.attributes["weft.attempt"])] = one.end
    for one in spans:  # the time of a transfer after prefill
        if one.name == "await" and one.parent in parts:
            sequence = str(one.attributes["weft.sequence"])
            since = prefill_ends.get((sequence, int(one.attributes["weft.attempt"])))
            if since is not None:
                sums[sequence]["transfer"] += max(one.end - since, 0) / 1e9
    if attempts:
        slowest = max(attempts, key=lambda one: (sum(sums[one].values()), len(attempts[one])))
        row.attempts = len(attempts[slowest])
        row.stages |= sums[slowest]
    return row


def table(found: Sequence[RequestRow]) -> str:
    """Return the rows as text, in columns."""
    lines = [["request", *COLUMNS], *(row.cells() for row in found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]

    def text(line: list[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)]
        return "  ".join([*cells, line[-1]])

    return "\n".join(text(line) for line in lines)
