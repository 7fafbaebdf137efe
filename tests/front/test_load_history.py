"""The load history: the ring of samples, the merge of several API servers, and the route."""

from __future__ import annotations

import math
import sys
from typing import Any

import httpx
import msgspec
import pytest

from weft.front.monitoring.load_history import (
    SECONDS,
    WINDOW,
    EngineState,
    LoadHistory,
    Point,
    Sample,
    decode,
    encode,
    merged,
    points,
    quantile,
)
from weft.types.messages import EngineStats

BOUNDS = ((0.1, 1.0, math.inf), (0.01, math.inf))
NONE = ((0, 0, 0), (0, 0))


def engine(name: str = "0", **stats: Any) -> EngineState:
    return EngineState(name, "", True, EngineStats(free_slots=8, **stats))


def of(history: LoadHistory, since: int = 0) -> list[Point]:
    return points(history.since(since - WINDOW), since, BOUNDS)


def test_a_point_has_rates_rows_per_step_and_gauges_of_all_engines() -> None:
    history = LoadHistory()
    history.add(100.0, [engine("0"), engine("1")], NONE)
    one = engine("0", generation_tokens=30, prompt_tokens=8, steps=4, decode_rows=12, running=2, kv_usage=0.5)
    two = engine("1", generation_tokens=10, prompt_tokens=0, steps=4, decode_rows=4, waiting=3, kv_usage=0.25)
    history.add(102.0, [one, two], NONE)
    (point,) = of(history)
    assert point == Point(102, 20.0, 4.0, 2.0, 0.0, 2, 3, 0.5, None, None, None, None)
    assert [(load.name, load.role, load.steps_per_second) for load in history.engines] == [
        ("0", "unified", 2.0),
        ("1", "unified", 2.0),
    ]
    assert history.engines[0].decode_rows_per_step == 3.0


def test_the_past_of_an_engine_is_no_growth_and_a_restarted_engine_counts_from_zero() -> None:
    history = LoadHistory()
    history.add(1.0, [EngineState("0", "", True, EngineStats())], NONE)
    history.add(2.0, [engine(generation_tokens=9000)], NONE)  # the first heartbeat that this process hears
    history.add(3.0, [engine(generation_tokens=9050)], NONE)
    history.add(4.0, [engine(generation_tokens=20)], NONE)
    assert [point.output_per_second for point in of(history)] == [0.0, 50.0, 20.0]


def test_latencies_are_of_the_last_minute() -> None:
    history = LoadHistory()
    history.add(0.0, [], NONE)
    history.add(1.0, [], ((10, 10, 10), (0, 0)))
    for second in range(2, WINDOW + 3):
        history.add(float(second), [], ((10, 20, 20), (0, 0)))
    found = of(history)
    assert found[0].ttft_p50 == 0.05
    assert found[WINDOW - 1].ttft_p50 == 0.1  # the last point with both observations in its window
    assert found[WINDOW].ttft_p50 == 0.55
    assert found[WINDOW + 1].ttft_p50 is None
    assert found[0].itl_p50 is None
    later = points(history.since(WINDOW - WINDOW), WINDOW, BOUNDS)
    assert later == found[WINDOW:], "a part of the history has the same values as the whole"


def test_the_ring_is_bounded_in_samples_and_bytes() -> None:
    history = LoadHistory()
    full = tuple(range(0, 21_000_000, 1_000_000))
    for second in range(SECONDS + 50):
        counts = tuple(value * second for value in full)
        history.add(float(second), [engine(generation_tokens=second << 30)], (counts, counts))
    samples = history.since(0)
    assert len(samples) == SECONDS
    assert samples[-1].second == SECONDS + 49
    parts = [one for sample in samples for one in (sample, *msgspec.structs.astuple(sample))]
    parts += [count for sample in samples for counts in sample.latencies for count in (counts, *counts)]
    assert sum({id(one): sys.getsizeof(one) for one in parts}.values()) < SECONDS * 2400


def test_a_second_is_added_once_and_a_stall_is_one_sample() -> None:
    history = LoadHistory()
    history.add(10.0, [engine()], NONE)
    history.add(10.3, [engine(generation_tokens=5)], NONE)
    history.add(14.0, [engine(generation_tokens=40)], NONE)
    assert [(point.second, point.output_per_second) for point in of(history)] == [(14, 10.0)]


def at(second: int, output: int, *latencies: tuple[int, ...]) -> Sample:
    return Sample(second, 1.0, output, 0, 1, 1, 0, 1, 0, 0.5, latencies or ((), ()))


def test_rings_of_several_servers_are_one() -> None:
    one = [at(5, 7, (1, 0, 2), ()), at(6, 8)]
    two = [at(4, 6), at(5, 7, (1, 1, 0), (3, 0))]
    found = merged([one, decode(encode(two), BOUNDS)])
    assert [(sample.second, sample.output) for sample in found] == [(4, 6), (5, 7), (6, 8)]
    assert found[1].latencies == ((2, 1, 2), (3, 0))


def test_samples_of_another_version_are_left_out() -> None:
    assert decode(b"# HELP weft", BOUNDS) == []
    assert decode(encode([at(1, 0, (1, 2), ())]), BOUNDS) == []
    assert decode(b"", BOUNDS) == []


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [((0, 0, 0), 0.5, None), ((4, 0, 0), 0.5, 0.05), ((2, 2, 0), 0.75, 0.55), ((0, 0, 1), 0.5, 1.0)],
)
def test_quantiles(counts: tuple[int, ...], share: float, value: float | None) -> None:
    assert quantile(counts, BOUNDS[0], share) == (None if value is None else pytest.approx(value))


# -- the route ---------------------------------------------------------------------------------------


def columns(answer: httpx.Response) -> dict[str, list[Any]]:
    found = answer.json()
    return {name: [point[at] for point in found["points"]] for at, name in enumerate(found["columns"])}


@pytest.mark.slow
def test_the_route_continues_after_a_second(fake: Any) -> None:
    fake.chat(max_tokens=8)
    fake.wait(lambda: len(fake.http.get("/metrics/history").json()["points"]) > 1, 10)
    fake.wait(lambda: columns(fake.http.get("/metrics/history"))["ttft_p50"][-1] is not None, 10)
    first = fake.http.get("/metrics/history").json()
    assert [one["name"] for one in first["engines"]] == ["0"]
    assert len(first["points"][-1]) == len(first["columns"])
    second = first["points"][-1][0]
    assert second <= first["now"] + 1
    fake.wait(lambda: fake.http.get(f"/metrics/history?since={second}").json()["points"] != [], 10)
    (point, *_) = fake.http.get(f"/metrics/history?since={second}").json()["points"]
    assert point[0] > second


@pytest.mark.parametrize("since", ["", "x", "-1", "1.5", "9" * 30])
def test_the_route_refuses_what_is_no_second(fake: Any, since: str) -> None:
    answer = fake.http.get("/metrics/history", params={"since": since})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "since")


def test_the_route_has_the_key_of_the_metrics(start_fake: Any) -> None:
    closed = start_fake(api_key=["user"], admin_key=["admin"])
    for key, status in ((None, 401), ("admin", 401), ("user", 200)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        for path in ("/metrics", "/metrics/history", "/metrics/history/"):
            assert closed.http.get(path, headers=headers).status_code == status, (key, path)
    opened = start_fake(api_key=["user"], open_metrics=True)
    assert opened.http.get("/metrics/history").status_code == 200
    assert opened.http.get("/v1/models").status_code == 401


def test_every_front_answers_for_all(start_fake: Any) -> None:
    server = start_fake(fronts=2)
    for _ in range(8):
        with httpx.Client(base_url=server.url, timeout=server.http.timeout) as client:  # another connection
            body = {"model": server.model, "prompt": "hi", "max_tokens": 4}
            assert client.post("/v1/completions", json=body).status_code == 200

    def all_fronts_agree() -> bool:
        with httpx.Client(base_url=server.url, timeout=server.http.timeout) as client:
            found = columns(client.get("/metrics/history"))["ttft_p50"]
        return bool(found) and found[-1] is not None

    server.wait(all_fronts_agree, 10)
    assert all(all_fronts_agree() for _ in range(8))
