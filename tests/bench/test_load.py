"""Load on a real server with known timing and faults."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft.bench import plots, report, serving_bench, sweep
from weft.bench.load import Limits
from weft.bench.schedule import LengthRange, Planned
from weft.bench.serving_bench import RunSettings
from weft.bench.workloads import WORKLOADS, prompts
from weft.cli import main as cli
from weft.common.errors import ConfigError, WeftError

pytestmark = pytest.mark.slow


def asked(fake: Any, requests: int | None = 8, concurrency: int | None = 4, **more: Any) -> RunSettings:
    bounds = {"duration": None, "request_timeout": 10.0, **more.pop("limits", {})}
    return RunSettings(
        url=fake.url,
        limits=Limits(concurrency=concurrency, requests=requests, **bounds),
        **{
            "warmup": 0,
            "progress": False,
            "input_len": LengthRange(8, 8),
            "output_len": LengthRange(5, 5),
            **more,
        },
    )


def test_every_request_may_have_a_connection_of_its_own(fake: Any) -> None:
    assert serving_bench.measure(asked(fake, requests=6, concurrency=1))["requests"]["ok"] == 6
    assert len(fake.clients) < 3  # the first request to the server may have used another connection
    found = serving_bench.measure(asked(fake, requests=6, concurrency=1, keep_alive=False))
    assert found["requests"]["ok"] == 6
    assert found["setup"]["keep_alive"] is False
    assert len(fake.clients) > 6


def test_latency_and_throughput_are_those_of_the_server(fake: Any) -> None:
    found = serving_bench.measure(asked(fake, levels={"ttft": 1e4, "e2el": 1.0}))
    assert found["requests"] == {"sent": 8, "ok": 8, "failed": 0, "unfinished": 0}
    assert (found["prompt_tokens"], found["output_tokens"]) == (8 * 7, 8 * 5)
    times = found["latency_ms"]
    # 50 ms to the first of five tokens, then 10 ms each; a late first token shortens the next gap.
    for name, least in (("ttft", 50), ("tpot", 5), ("itl", 5), ("e2el", 89)):
        assert least <= times[name]["p50"] <= deadline(3 * least + 60), name
    assert found["output_token_throughput"] == pytest.approx(40 / found["seconds"], rel=0.01)
    assert found["goodput"]["requests"] == 0
    assert fake.most == 4
    assert "TTFT" in report.table(found)
    assert found["notes"] == []


@pytest.mark.requirement("D31")
def test_rates_are_reported_per_engine_if_the_server_names_their_number(fake: Any) -> None:
    none = serving_bench.measure(asked(fake))
    assert (none["heads"], none["per_head"]) == ({}, None)
    fake.heads = ["encode", "prefill", "decode", "encode"]
    found = serving_bench.measure(asked(fake, levels={"ttft": 1e4}))
    assert found["heads"] == {"encode": 2, "prefill": 1, "decode": 1}
    rates = found["per_head"]
    assert rates["requests_per_second"] == pytest.approx(found["request_throughput"] / 4, rel=0.01)
    assert rates["goodput_per_second"] == pytest.approx(found["goodput"]["per_second"] / 4, rel=0.01)
    assert "(1 decode, 2 encode, 1 prefill)" in report.table(found)


def test_every_prompt_is_another_and_of_the_length(fake: Any) -> None:
    serving_bench.measure(asked(fake))
    made = [tuple(body["prompt"]) for body in fake.bodies]
    assert {len(ids) for ids in made} == {8}
    assert len(set(made)) == 8
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in fake.bodies)


def test_failures_are_counted_by_kind_and_do_not_count_as_speed(fake: Any) -> None:
    fake.faults = {0: "429", 1: "cut", 2: "error", 3: "garbage", 4: "hang", 5: "429"}
    found = serving_bench.measure(asked(fake, limits={"request_timeout": deadline(1.0)}))
    assert found["failures"] == {"http_429": 2, "broken": 1, "protocol": 1, "stream_error": 1, "timeout": 1}
    assert found["requests"]["ok"] == 2
    assert found["output_tokens"] == 10
    assert "http_429" in found["first_failure"]
    assert "5 (" not in report.table(found)


def test_a_dead_server_is_one_error(fake: Any) -> None:
    with pytest.raises(WeftError, match="no answer"):
        serving_bench.measure(dataclasses.replace(asked(fake), url="http://127.0.0.1:9"))


def test_open_loop_sends_at_its_times(fake: Any) -> None:
    trace = [Planned(0.1 * n, 4, 2) for n in range(6)]
    fake.first = 0.3
    found = serving_bench.measure(asked(fake, requests=6, concurrency=None, trace=trace))
    assert found["requests"]["ok"] == 6
    gaps = [b - a for a, b in itertools.pairwise(fake.times)]
    assert sum(gaps) == pytest.approx(0.5, abs=deadline(0.2))
    assert fake.most >= 3, "nobody waited for an answer before sending the next"
    assert found["client"]["late_ms_p99"] < deadline(200)


def test_a_duration_ends_the_sending_and_lets_answers_end(fake: Any) -> None:
    found = serving_bench.measure(asked(fake, requests=None, concurrency=2, limits={"duration": 0.5}))
    assert found["requests"]["ok"] == found["requests"]["sent"] >= 4
    assert found["seconds"] < deadline(5)


def test_a_run_out_of_time_keeps_what_it_has(fake: Any) -> None:
    fake.faults = {6: "hang", 7: "hang"}
    began, limit = time.monotonic(), deadline(1.5)
    found = serving_bench.measure(asked(fake, limits={"run_timeout": limit, "request_timeout": 60.0}))
    assert time.monotonic() - began < limit + deadline(4.5)
    assert found["timed_out"]
    assert found["requests"] == {"sent": 8, "ok": 6, "failed": 0, "unfinished": 2}


def test_interrupting_gives_what_was_measured(fake: Any) -> None:
    fake.faults = {7: "hang"}

    def interrupt() -> None:
        until = time.monotonic() + deadline(8)
        while time.monotonic() < until and not (len(fake.bodies) == 8 and fake.live == 1):
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    found = serving_bench.measure(asked(fake))
    assert found["interrupted"]
    assert found["requests"]["ok"] == 7
    assert found["requests"]["unfinished"] == 1


def test_a_server_without_ids_gets_text_sized_by_its_token_count(fake: Any) -> None:
    fake.takes_ids = False
    found = serving_bench.measure(asked(fake, requests=2))
    assert found["setup"]["prompts"] == "text"
    # The tool counts two tokens per word.
    assert [len(body["prompt"].split()) for body in fake.bodies] == [4, 4]
    with pytest.raises(WeftError, match="refuses token ids"):
        serving_bench.measure(asked(fake, prompts="ids"))


def test_chat(fake: Any) -> None:
    found = serving_bench.measure(asked(fake, requests=2, endpoint="chat"))
    assert found["requests"]["ok"] == 2
    assert "messages" in fake.bodies[0]


def test_answers_without_counts_and_with_many_tokens_a_chunk_are_noted(fake: Any) -> None:
    fake.usage = False
    assert "so chunks were counted" in serving_bench.measure(asked(fake))["notes"][0]
    fake.usage, fake.chunk_tokens = True, 3
    assert "2.5 tokens on average" in serving_bench.measure(asked(fake))["notes"][0]


def test_a_workload_sends_its_prompts(fake: Any) -> None:
    fake.first = fake.gap = 0.0
    one = WORKLOADS["W4"]
    small = dataclasses.replace(one, output_tokens=2)
    serving_bench.measure(asked(fake, requests=32, concurrency=8, workload=small, repetition=3, warmup=2))
    sent = [body["prompt"] for body in fake.bodies]
    assert len(sent) == 34
    assert sorted(sent[2:]) == sorted(prompts(one, 3, 16_384))
    assert not [ids for ids in sent[:2] if ids in sent[2:]], "the warm-up has prompts of its own"


def test_a_failed_warm_up_reports_the_reason(fake: Any) -> None:
    fake.faults = {0: "503"}
    with pytest.raises(WeftError, match="http_503"):
        serving_bench.measure(asked(fake, warmup=1))


def test_a_sweep_goes_on_after_a_point_that_fails(fake: Any, tmp_path: Path) -> None:
    chosen = sweep.Sweep(concurrency=(1, 2), context=(16, 32), output_len=3, rounds=2, seconds=5.0)
    fake.faults = {1: "500", **dict.fromkeys(range(17, 19), "400")}
    lines: list[str] = []
    base = asked(fake, requests=1, concurrency=1)
    found = sweep.run_sweep(chosen, base, lines.append)
    counts = [point["requests"]["ok"] for point in found["concurrency"] + found["context"]]
    assert counts == [7, 8, 0, 2]
    assert "http_500" in found["concurrency"][0]["error"]
    assert found["context"][1]["ttft_ms"]["p50"] >= 50
    assert len(lines) == 5
    plots.plot_sweep(found, "fake", tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def weft(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, plot = tmp_path / "r.json", tmp_path / "r.png"
    common = ("serve", "--base-url", fake.url, "--num-requests", "4", "--output-len", "3", "--warmup", "1")
    assert weft(*common, "--goodput", "ttft:5000", "--json", str(result), "--plot", str(plot)) == 0
    found = json.loads(result.read_text())
    assert found["requests"]["ok"] == found["goodput"]["requests"] == 4
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "output tok/s" in capsys.readouterr().out
    fake.faults = dict.fromkeys(range(100), "500")
    assert weft(*common[:-1], "0") == 1
    assert "http_500 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["serve"], "--base-url"),
        (["serve", "--base-url", "localhost:1"], "--base-url"),
        (["serve", "--base-url", "http://x", "--request-rate", "0"], "--request-rate"),
        (["serve", "--base-url", "http://x", "--workload", "W4", "--num-requests", "1"], "--workload"),
        (["serve", "--base-url", "http://x", "--extra-body", "[]"], "--extra-body"),
        (["serve", "--base-url", "http://x", "--json", "/no/such/folder/x"], "--json"),
        (["serve", "--base-url", "http://x", "--dataset", "/no/such/file"], "--dataset"),
        (["sweep", "--concurrency", "a"], "--concurrency"),
        (["offline", "--alone"], "--alone"),
        (["make-checkpoint", "nothing"], "qwen3-dense-s"),
        (["make-checkpoint"], "--list"),
    ],
)
def test_wrong_flags_are_one_line(
    arguments: list[str], about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft(*arguments) == 2
    err = capsys.readouterr().err
    assert about in err
    assert err.count("\n") == 1


def test_missing_matplotlib_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"weft\[bench\]"):
        plots.require_matplotlib()
