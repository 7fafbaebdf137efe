"""Spans of engines and API servers: every stage of a sequence, for any path and any end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.common.errors import EngineDead
from weft.control.fleet import fleet_events as e
from weft.control.links.placements import Placements
from weft.engine.disagg.transfer_notes import (
    BOUND,
    FIRST_BYTE,
    LAST_BYTE,
    OFFERED,
    TransferNotes,
    TransferTally,
)
from weft.engine.request_spans import RequestSpans
from weft.front.monitoring.request_trace import RequestTrace
from weft.tracing.merge_traces import ReadSpan, read_folder
from weft.tracing.trace_spans import SpanContext, parse_traceparent
from weft.tracing.writer import SpanWriter
from weft.types import messages as m
from weft.types.media_item import MediaItem
from weft.types.sampling import TokenParams
from weft.types.transfer import Peer, TransferKey, TransferParameters

PARENT = SpanContext.root()
KEY = TransferKey(transfer=7, attempt=0, incarnation=1)


class Rig:
    """A writer, a clock, and the written spans."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.writer = SpanWriter(str(folder), "head")

    def time(self) -> float:
        return self.now

    def spans(self) -> list[ReadSpan]:
        self.writer.close()
        return read_folder(self.folder)[0]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def submit(sequence: int = 7, sends: bool | None = None, **more: Any) -> m.Submit:
    transfer = None
    if sends is not None:
        peer = Peer(name="ipc:///other", incarnation=2)
        transfer = TransferParameters(key=KEY, peer=peer, sends=sends, seconds=60.0)
    return m.Submit(
        **{
            "sequence": sequence,
            "request": 1,
            "seed": 0,
            "prompt_ids": m.ids_to_bytes([1, 2, 3]),
            "params": TokenParams(temperature=0.0, max_tokens=4),
            "trace": PARENT.traceparent(),
            "transfer": transfer,
            **more,
        }
    )


def record(spans: RequestSpans, *ids: int, finish: str | None = None, sequence: int = 7) -> None:
    spans.record([m.TokenEvent(sequence=sequence, token_ids=ids, finish=finish)])


def stages(rig: Rig) -> list[tuple[str, float]]:
    return [(span.name, round(span.seconds, 3)) for span in rig.spans()]


def test_a_group_that_does_all(rig: Rig) -> None:
    spans = RequestSpans(rig.writer, rig.time)
    spans.submitted(submit(), rig.now)
    spans.admitted([7, 8], 101.0)
    rig.now = 103.0
    record(spans, 5)
    rig.now = 104.0
    record(spans, 6)
    spans.admitted([7], 105.0)  # after a preemption
    rig.now = 110.0
    record(spans, 6, finish="length")
    record(spans, 6)  # late
    queue, prefill, decode = rig.spans()
    assert [round(s.seconds, 3) for s in (queue, prefill, decode)] == [1.0, 2.0, 7.0]
    assert [name for name, _ in decode.events] == ["first decoded token", "admitted again"]
    assert decode.attributes["weft.finish"] == "length"
    assert decode.attributes["weft.output_tokens"] == 3
    assert queue.attributes["weft.prompt_tokens"] == 3
    assert {(s.trace, s.parent) for s in (queue, prefill, decode)} == {(PARENT.trace, PARENT.span)}


def test_a_sender_and_its_transfer(rig: Rig) -> None:
    spans = RequestSpans(rig.writer, rig.time)
    spans.submitted(submit(sends=True), rig.now)
    spans.admitted([7], 101.0)
    rig.now = 103.0
    record(spans, 5, finish="moved")
    tally = TransferTally(sends=True)
    tally.ended = spans.transfer_ended
    notes = TransferNotes(Peer(name="ipc:///other", incarnation=2), nbytes=99)
    for when, name in enumerate((OFFERED, BOUND, FIRST_BYTE, LAST_BYTE, LAST_BYTE)):
        notes.mark(name, 101.0 + when)
    tally.received(KEY, notes, 105.5)
    spans.transfer_ended(KEY, notes, 106.0, None)  # already reported
    assert tally.stats.took.total == pytest.approx(2.0)
    assert stages(rig) == [("queue", 1.0), ("send", 5.5), ("prefill", 2.0)]


def test_a_receiver_whose_transfer_fails(rig: Rig) -> None:
    spans = RequestSpans(rig.writer, rig.time)
    spans.submitted(submit(sends=False), rig.now)
    tally = TransferTally(sends=False)
    tally.ended = spans.transfer_ended
    tally.failed(KEY, TransferNotes(Peer(name="x", incarnation=2)), EngineDead("gone").info(), 102.0, "here")
    rig.now = 102.0
    record(spans, finish="evicted")
    assert {(s.name, s.error, s.attributes.get("weft.finish")) for s in rig.spans()} == {
        ("receive", EngineDead.code, None),
        ("await", None, "evicted"),
    }


def pictures(count: int, sends: bool) -> tuple[MediaItem, ...]:
    peer = Peer(name="ipc:///other", incarnation=2)
    return tuple(
        MediaItem(
            key=bytes([number]) * 16,
            start=number,
            count=1,
            grid=(1, 2, 2),
            transfer=TransferParameters(key=TransferKey(number, 0, 1), peer=peer, sends=sends, seconds=60.0),
        )
        for number in range(count)
    )


def received(spans: RequestSpans, number: int, now: float) -> None:
    spans.transfer_ended(
        TransferKey(number, 0, 1), TransferNotes(Peer(name="x", incarnation=2), nbytes=9), now, None
    )


def test_a_sequence_whose_images_come_from_elsewhere(rig: Rig) -> None:
    spans = RequestSpans(rig.writer, rig.time)
    spans.submitted(submit(media=pictures(2, sends=False)), rig.now)
    received(spans, 1, 101.0)
    received(spans, 0, 103.0)
    received(spans, 0, 103.5)  # again
    spans.admitted([7], 104.0)
    rig.now = 105.0
    record(spans, 5, finish="length")
    spans.submitted(submit(8, media=pictures(1, sends=False)), rig.now)
    rig.now = 106.0
    record(spans, finish="evicted", sequence=8)
    received(spans, 0, 107.0)  # too late
    found = rig.spans()
    assert sorted((span.name, round(span.seconds, 3)) for span in found) == [
        ("await images", 1.0),
        ("await images", 3.0),
        ("prefill", 1.0),
        ("queue", 1.0),
        ("receive image", 1.0),
        ("receive image", 2.0),
        ("receive image", 3.0),
    ]
    assert {span.attributes.get("weft.images") for span in found if span.name == "await images"} == {1, 2}


def test_a_group_that_encodes(rig: Rig) -> None:
    spans = RequestSpans(rig.writer, rig.time)
    spans.submitted(submit(prompt_ids=b"", media=pictures(1, sends=True)), rig.now)
    spans.admitted([7], 101.0)
    received(spans, 0, 103.0)
    rig.now = 103.0
    record(spans, finish="moved")
    assert stages(rig) == [("queue", 1.0), ("send image", 3.0), ("encode", 2.0)]


def test_what_is_not_traced_leaves_nothing(rig: Rig) -> None:
    spans = RequestSpans(rig.writer, rig.time)
    for trace in ("", "nonsense"):
        spans.submitted(submit(trace=trace), rig.now)
        record(spans, 5, finish="stop")
    spans.submitted(submit(), rig.now)
    spans.close()
    assert [(span.name, span.error) for span in rig.spans()] == [("queue", "the engine ended")]


def test_places_of_a_sequence_in_a_front(rig: Rig) -> None:
    """Sent to a pair, lost with one instance, sent to another instance, and closed."""
    places = Placements(rig.writer, rig.time)
    places.open(7, PARENT)
    plain = submit(trace="")
    contexts = []
    for name, sends in (("prefill0", True), ("decode0", False)):
        sent = places.sent(name, submit(sends=sends, trace=""))
        assert isinstance(sent, m.Submit)
        contexts.append(parse_traceparent(sent.trace))
    places.record(_said("prefill0", token_ids=(5,), finish="moved"))
    places.lost("decode0")
    places.sent("other", submit(trace="", attempt=1))
    places.record(_said("other", finish="stop"))  # of an ended attempt
    places.closed(7)
    places.closed(7)
    assert places.sent("other", plain) is plain  # not traced any more
    spans = rig.spans()
    found = [
        (span.attributes["weft.instance"], span.attributes["weft.part"], span.attributes["weft.finish"])
        for span in spans
    ]
    assert sorted(found) == [
        ("decode0", "decode", "lost"),
        ("other", "all", "left"),
        ("prefill0", "prefill", "moved"),
    ]
    by_id = {span.span: span.attributes["weft.instance"] for span in spans}
    assert [by_id[context.span] for context in contexts if context] == ["prefill0", "decode0"]
    assert {span.parent for span in spans} == {PARENT.span}


def _said(instance: str, **event: Any) -> e.Received:
    tokens = m.Tokens(step=0, events=(m.TokenEvent(sequence=7, **event),))
    return e.Received(instance, 0, tokens)


def test_a_request_ends_once(rig: Rig) -> None:
    trace = RequestTrace(rig.writer, "chat", PARENT.traceparent())
    trace.note(prompt_tokens=3)
    trace.end("overloaded")
    trace.mark("late")
    trace.end()
    for header in (None, "x" * 10_000, "00-zz"):
        RequestTrace(rig.writer, "chat", header).end()
    first, *others = rig.spans()
    assert (first.trace, first.parent, first.error) == (PARENT.trace, PARENT.span, "overloaded")
    assert not first.events
    assert [(other.parent, other.error) for other in others] == [("", None)] * 3
    assert len({other.trace for other in others}) == 3
