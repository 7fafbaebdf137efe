"""``weft sim`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli import main as cli
from weft.cli.sim.sim import overrides
from weft.common.errors import ConfigError

SMALL = ["sim", "--requests", "6", "--prompt-tokens", "200-400", "--output-tokens", "8", "--background", "4"]


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_table_of_runs_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.json"
    others = ["--vs", "itl-target-ms=12 max-num-batched-tokens=512", "--vs", "step-policy=exclusive"]
    status, out, _ = ran(capsys, *SMALL, "--json", str(file), *others)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith("cost model: spool-text")
    assert "as given" in lines[1]
    assert "step-policy=exclusive" in lines[1]
    assert any(line.startswith("requests done / refused") and line.count("6 / 0") == 3 for line in lines)
    assert any(line.startswith("p99 beside / p50 alone") for line in lines)
    found = json.loads(file.read_text())
    assert [run["scheduler"]["itl_target_ms"] for run in found["runs"]] == [0.0, 12.0, 0.0]
    assert found["runs"][1]["scheduler"]["max_num_batched_tokens"] == 512
    assert found["runs"][2]["report"]["mixed_steps"] == 0
    assert found["runs"][0]["report"]["background_itl"]["p99"] > 0


def test_the_same_command_prints_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, *SMALL)[1] == ran(capsys, *SMALL)[1]
    assert ran(capsys, *SMALL)[1] != ran(capsys, *SMALL, "--workload-seed", "5")[1]


def test_poisson_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "sim", "--requests", "5", "--rate", "2", "--prompt-tokens", "10")
    assert (status, "5 / 0" in out) == (0, True)
    assert "background" not in out
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at": 0, "prompt_tokens": 30, "output_tokens": 4}\n')
    status, out, _ = ran(capsys, "sim", "--trace-file", str(file))
    assert (status, "1 / 0" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cost-model", "gone.json"], "gone.json"),
        (["--prompt-tokens", "many"], "--prompt-tokens must be"),
        (["--vs", "itl-target=4"], "Did you mean itl-target-ms?"),
        (["--vs", "port=4"], "not a flag of the scheduler"),
        (["--vs", "itl-target-ms"], "FLAG=VALUE"),
        (["--vs", "itl-target-ms=-3"], "--itl-target-ms must be"),
        (["--vs", " "], "--vs is empty"),
        (["--vs", "'x"], "--vs"),
        (["--max-model-len", "100"], "--max-model-len"),
        (["--trace-file", "gone.jsonl"], "gone.jsonl"),
        (["--json", "no/such/folder/x.json"], "--json"),
        (["--step-policy", "exclusive", "--itl-target-ms", "9"], "--step-policy exclusive"),
        (["--kv-tokens", "100"], "--kv-tokens 100 does not hold"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "sim", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("weft: ")
    assert err.count("\n") == 1
    assert says in err


def test_overrides() -> None:
    assert overrides("--itl-target-ms=40 max-num-seqs=8") == {"itl_target_ms": 40.0, "max_num_seqs": 8}
    with pytest.raises(ConfigError):
        overrides("max-num-seqs=zero")


@pytest.mark.slow
def test_a_plan_of_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every division into roles is simulated, and the smallest number of groups that meets the goal is
    named.
    """
    file = tmp_path / "plan.json"
    plan = ["sim", "plan", "--requests", "20", "--most-groups", "2", "--rate", "1", "--json", str(file)]
    status, out, _ = ran(capsys, *plan, "--ttft-ms", "100000", "--tpot-ms", "100000")
    assert status == 0
    assert "the smallest deployment that reaches 95%: 1 unified" in out
    assert len(json.loads(file.read_text())["runs"]) == 3
    status, out, _ = ran(capsys, *plan, "--tpot-ms", "0.001")
    assert status == 0
    assert "no deployment reaches 95%" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bandwidth", "fast"], "--bandwidth must be a size"),
        (["--kv-tokens", "100"], "--kv-tokens 100 does not hold"),
        (["--json", "no/such/folder/x.json"], "--json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_of_a_plan_are_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = ran(capsys, "sim", "plan", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err


def test_options_of_one_command_are_no_options_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "sim", "--requests", "3", "plan")
    assert (status, out) == (2, "")
    assert err == "weft: --requests is not an option of weft sim plan\n"


@pytest.mark.parametrize("name", ["explore", "replay"])
def test_commands_of_the_fault_explorer_name_the_new_place(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = ran(capsys, "sim", name, "--seed", "3")
    assert (status, out) == (2, "")
    assert err.startswith(f"weft: weft sim {name} ")
    assert "make simulate" in err
