"""Workloads in process: counts and rates with a fake engine, then the command on the bundled model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from weft.bench import offline
from weft.bench.workloads import WORKLOADS, prompts
from weft.cli import main as cli
from weft.cli.bench import bench_load
from weft.common.errors import WeftError
from weft.config.sections.all import Config, RunnerSection, SchedulerSection

SMALL = dataclasses.replace(WORKLOADS["W1"], requests=4, prompt_tokens=6, output_tokens=5)


def echo(ids: list[list[int]], tokens: int) -> list[list[int]]:
    return [[one[0]] * tokens for one in ids]


def test_rates_are_of_the_median_round() -> None:
    found = offline.result(WORKLOADS["W1"], [4.0, 2.0, 8.0])
    assert found["seconds"] == 4.0
    assert found["output_tokens_per_second"] == 32 * 128 / 4
    assert found["ms_per_token"] is None
    single = offline.result(WORKLOADS["W2"], [2.56])
    assert single["ms_per_token"] == pytest.approx(10.0)
    assert offline.headline(WORKLOADS["W2"], single) == "10.00 ms/token"
    assert offline.headline(WORKLOADS["W3"], offline.result(WORKLOADS["W3"], [2.0])) == "8,192 prompt tok/s"


def test_every_round_has_prompts_of_its_own() -> None:
    seen: list[list[list[int]]] = []

    def generate(ids: list[list[int]], tokens: int) -> list[list[int]]:
        seen.append(ids)
        return echo(ids, tokens)

    done: list[str] = []
    found = offline.measure(generate, [SMALL], 2, 7, 1024, done.append)
    assert seen[1:] == [prompts(SMALL, 7, 1024), prompts(SMALL, 8, 1024)]
    assert list(found) == ["W1"]
    assert done == ["warm-up", "W1", "W1"]
    with pytest.raises(WeftError, match="requested length"):
        offline.measure(lambda ids, tokens: echo(ids, tokens - 1), [SMALL], 1, 0, 1024)


def test_requests_that_differ_are_counted() -> None:
    assert offline.differing([[[1], [2], [3]], [[1], [9], [3]], [[1], [8], [4]]]) == 2
    calls: list[int] = []

    def moody(ids: list[list[int]], tokens: int) -> list[list[int]]:
        calls.append(len(ids))
        return [[100 + len(calls) if number == 0 else 5] for number in range(len(ids))]

    found = offline.identical(moody, SMALL, 3, True, 0, 1024)
    assert found["requests_that_differ"] == 1
    assert found["requests_that_differ_alone"] == 4, "every request is number 0 of its own call"
    assert calls == [4, 4, 4, 1, 1, 1, 1]


def weft(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    return ended.value.code


def test_the_command_on_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(WORKLOADS, "W1", SMALL)
    common = (
        "offline",
        "spool-text",
        "--workload",
        "W1",
        "--threads",
        "1",
        "--json",
        str(tmp_path / "r.json"),
    )
    assert weft(*common, "--rounds", "2") == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["load_seconds"] > 0
    assert found["peak_memory"] > 100 << 20
    assert len(found["workloads"]["W1"]["rounds"]) == 2
    assert found["settings"]["threads"] == "1"
    assert weft(*common, "--identical", "2", "--alone", "--dtype", "float64") == 0
    out = capsys.readouterr().out
    assert "W1 run 2 times: 0 of 4 requests differ" in out
    assert "alone against batched: 0 of 4 requests differ" in out


def test_a_configuration_becomes_the_flags_that_give_it() -> None:
    config = Config(
        runner=RunnerSection(threads=2), scheduler=SchedulerSection(max_num_seqs=7, step_policy="exclusive")
    )
    arguments = bench_load.server_arguments(config)
    assert arguments[0] == "spool-text"
    from weft.cli import options

    pairs = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    given = {flag[2:].replace("-", "_"): value for flag, value in pairs.items()}
    assert options.build({**given, "threads": int(given["threads"])}, arguments[0]).scheduler.step_policy
    assert pairs == {"--threads": "2", "--max-num-seqs": "7", "--step-policy": "exclusive"}


@pytest.mark.slow
def test_a_sweep_starts_and_ends_its_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "sweep.json"
    points = ("--concurrency", "1,2", "--context", "64,100000", "--input-len", "16", "--output-len", "4")
    flags = ("--vocab-size", "1024", "--threads", "1", "--point-seconds", "60", "--json", str(result))
    assert weft("sweep", "spool-text", *points, *flags) == 0
    found = json.loads(result.read_text())
    assert [point["requests"]["ok"] for point in found["concurrency"]] == [8, 8]
    assert found["context"][0]["prompt_tokens"] == 128
    assert "http_400" in found["context"][1]["error"], "too long for the model: said, and the sweep goes on"
    assert found["ready_seconds"] > 0
    assert found["peak_memory"] > 100 << 20
    assert "ready after" in capsys.readouterr().out
