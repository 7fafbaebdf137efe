"""Percentiles, service levels, schedules, lengths, traces, workloads: pure functions."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench import schedule, stats, sweep
from weft.bench.client import random_words
from weft.bench.records import RequestRecord, read_stream
from weft.bench.schedule import LengthRange, Planned
from weft.bench.workloads import WORKLOADS, prompts, safe_range
from weft.common.errors import ConfigError

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert stats.percentile(values, share) == pytest.approx(numpy.percentile(values, share), abs=1e-6)


def test_a_summary_names_what_it_holds() -> None:
    found = stats.summary([float(n) for n in range(101)])
    assert found == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert stats.summary([]) is None
    with pytest.raises(ValueError, match="needs values"):
        stats.percentile([], 50)


def test_levels_are_read_and_kept() -> None:
    levels = stats.parse_levels(["ttft:500,tpot:50", "e2el:9000"])
    assert levels == {"ttft": 500.0, "tpot": 50.0, "e2el": 9000.0}
    assert stats.meets(levels, {"ttft": 500.0, "tpot": None, "e2el": 1.0})
    assert not stats.meets(levels, {"ttft": 500.1, "tpot": 1.0, "e2el": 1.0})


@pytest.mark.parametrize("word", ["ttft", "ttft:0", "ttft:nan", "itl:5", "ttft:5,ttft:6", "tpot:inf"])
def test_wrong_levels_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        stats.parse_levels([word])


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0, math.inf])
def test_arrivals_have_the_rate_and_the_spread(burstiness: float) -> None:
    times = list(itertools.islice(schedule.arrivals(10.0, burstiness, random.Random(1)), 20_000))
    gaps = numpy.diff([0.0, *times])
    assert min(gaps) >= 0
    assert numpy.mean(gaps) == pytest.approx(0.1, rel=0.05)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert numpy.std(gaps) / numpy.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05, abs=1e-9)


def test_a_plan_is_a_function_of_its_seed() -> None:
    def plan(seed: int) -> list[Planned]:
        made = schedule.random_plan(LengthRange(10, 20), LengthRange(3, 3), 5.0, 1.0, seed)
        return list(itertools.islice(made, 200))

    assert plan(1) == plan(1) != plan(2)
    assert {one.input_len for one in plan(1)} == set(range(10, 21))
    assert {one.output_len for one in plan(1)} == {3}
    closed = next(schedule.random_plan(LengthRange(4, 4), LengthRange(3, 3), None, 1.0, 0))
    assert closed == Planned(None, 4, 3)


def test_lengths_are_read() -> None:
    assert schedule.parse_lengths("512", "--input-len") == LengthRange(512, 512)
    assert schedule.parse_lengths("128:1024", "--input-len") == LengthRange(128, 1024)
    for text in ("", "0", "9:3", "a", "1:2:3", "-1"):
        with pytest.raises(ConfigError, match="--input-len"):
            schedule.parse_lengths(text, "--input-len")


def test_a_trace_is_read_by_time(tmp_path: Path) -> None:
    lines = [
        {"at": 2, "input_len": 5, "output_len": 6},
        {"at": 1, "prompt": "hello"},
        {"at": 4.0, "prompt": [1, 2, 3], "output_len": 1},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert schedule.read_trace(path, 2.0, LengthRange(9, 9)) == [
        Planned(0.5, 5, 9, text="hello"),
        Planned(1.0, 5, 6),
        Planned(2.0, 3, 1, ids=[1, 2, 3]),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"at": 1}',
        '{"at": -1, "input_len": 3}',
        '{"at": 1, "input_len": 0}',
        '{"at":1,"prompt":["a"]}',
    ],
)
def test_a_wrong_trace_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "input_len": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        schedule.read_trace(path, 1.0, LengthRange(1, 1))


def test_workloads_are_what_peers_are_measured_with() -> None:
    shapes = {
        name: (w.requests, w.prompt_tokens, w.output_tokens, w.concurrency) for name, w in WORKLOADS.items()
    }
    assert shapes == {
        "W1": (32, 512, 128, None),
        "W2": (1, 32, 256, None),
        "W3": (8, 2048, 1, None),
        "W4": (32, 256, 64, 8),
    }


def test_prompts_are_fixed_and_share_no_prefix() -> None:
    one, again, other = (prompts(WORKLOADS["W1"], r, 16_384) for r in (0, 0, 1))
    assert one == again
    assert [len(ids) for ids in one] == [512] * 32
    assert len({tuple(ids[:8]) for ids in one + other}) == 64
    assert all(token in safe_range(16_384) for ids in one for token in ids)
    # Other engines were measured with the same values, so the values must never change.
    assert one[0][:4] == PINNED
    with pytest.raises(ConfigError):
        safe_range(3)


PINNED = [6388, 12889, 14320, 10814]


def test_words_are_a_function_of_their_key() -> None:
    assert random_words("a", 5) == random_words("a", 5) != random_words("b", 5)
    assert len(random_words("a", 5).split()) == 5


def test_powers() -> None:
    assert sweep.powers("1..64", "--concurrency") == (1, 2, 4, 8, 16, 32, 64)
    assert sweep.powers("256..5000", "--context") == (256, 512, 1024, 2048, 4096)
    assert sweep.powers("1,3", "--concurrency") == (1, 3)
    assert sweep.powers("none", "--context") == ()
    for text in ("", "0..4", "a", "8..4", "1..2..3"):
        with pytest.raises(ConfigError, match="--context"):
            sweep.powers(text, "--context")


def chunk(text: str | None = None, finish: str | None = None, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish, **more}]}).encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}'
DONE = b"data: [DONE]"


def read(*lines: tuple[float, bytes]) -> RequestRecord:
    record = RequestRecord(number=0, planned=None, sent=1.0)
    read_stream(record, lines)
    return record


def test_a_stream_is_counted_by_its_usage() -> None:
    found = read(
        (1.5, chunk("ab")), (1.7, chunk("c")), (2.5, chunk("de", "length")), (2.6, USAGE), (2.6, DONE)
    )
    assert (found.outcome, found.output_tokens, found.counted, found.prompt_tokens) == ("ok", 5, "usage", 9)
    assert found.ttft == pytest.approx(0.5)
    assert found.tpot == pytest.approx(1.0 / 4)
    assert found.itl == pytest.approx([0.2, 0.8])
    assert found.e2el == pytest.approx(1.5)


def test_a_stream_without_usage_is_counted_by_ids_then_by_chunks() -> None:
    by_ids = read((2.0, chunk("a", token_ids=[1, 2])), (3.0, chunk("", "stop", token_ids=[3])), (3.0, DONE))
    assert (by_ids.output_tokens, by_ids.counted, by_ids.arrivals) == (3, "token_ids", [2.0, 3.0])
    by_chunks = read((2.0, chunk("a")), (3.0, chunk("b", "stop")), (3.0, DONE))
    assert (by_chunks.output_tokens, by_chunks.counted) == (2, "chunks")


def test_chunks_without_output_are_not_the_first_token() -> None:
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
    text = b'data: {"choices": [{"delta": {"content": "a"}}]}'
    end = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}'
    found = read((1.1, role), (1.2, b": comment"), (2.0, text), (2.5, end), (2.5, DONE))
    assert (found.arrivals, found.output_tokens, found.last, found.outcome) == ([2.0], 1, 2.0, "ok")
    # A token without text is known from the server's count, and came with the end.
    silent = read((2.0, text), (2.5, end), (2.5, USAGE), (2.5, DONE))
    assert (silent.arrivals, silent.last, silent.tpot) == ([2.0], 2.5, pytest.approx(0.125))


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([(2.0, chunk("a"))], "broken"),
        ([(2.0, chunk("a")), (2.0, DONE)], "broken"),
        ([(2.0, chunk("a", "stop"))], "broken"),
        ([(2.0, chunk("", "stop")), (2.0, DONE)], "protocol"),
        ([(2.0, b"data: {]")], "protocol"),
        ([(2.0, chunk("a")), (2.1, b'data: {"error": {"message": "x"}}')], "stream_error"),
        ([], "broken"),
    ],
)
def test_incomplete_answers_are_not_ok(lines: list[tuple[float, bytes]], outcome: str) -> None:
    assert read(*lines).outcome == outcome
