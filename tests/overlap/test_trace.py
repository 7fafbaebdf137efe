"""Two tracks with communication spans, and the share of hidden communication."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e0.rig import submit
from tests.e0.test_grid import PROMPTS
from tests.overlap.rig import on_engines
from tests.support.checkpoints import make_checkpoint
from weft.engine.build import trace_of
from weft.overlap.overlap_report import main, sums, table
from weft.parallel.launcher import Flight
from weft.runner.step_trace import TRACKS, StepTrace
from weft.types.layout import Layout
from weft.types.sampling import TokenParams


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the trace of rank 0 of a run in micro-batches."""
    folder = tmp_path_factory.mktemp("trace")
    model = make_checkpoint(folder, "llama")
    params = TokenParams(temperature=0.0, max_tokens=6)

    def attach(mesh: Any, engine: Any, runner: Any) -> None:
        runner._trace = StepTrace(str(folder / f"{mesh.rank}.json"))

    on_engines(
        Layout(tensor=2),
        model,
        lambda: [[submit(1 + i, PROMPTS[i], params, request=i) for i in range(4)]],
        "all",
        each=attach,
    )
    return folder / "0.json"


@pytest.mark.requirement("C6", "C11")
def test_micro_batches_are_on_tracks_of_their_own(trace: Path) -> None:
    events = json.loads(trace.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == dict(enumerate(TRACKS))
    steps = [event for event in events if event.get("cat") == "step"]
    overlapped = [event["args"]["step"] for event in steps if event["args"]["micro_batches"] == 2]
    assert overlapped
    for step in overlapped:
        compute = [e for e in events if e.get("cat") == "compute" and e["name"] == f"step {step}"]
        links = [e for e in events if e.get("cat") == "communication" and e["args"]["step"] == step]
        # Of two layers: the embedding's sum and two of each layer, for each micro-batch; then the head's,
        # once.
        assert [e["tid"] for e in compute] == [0, 1] * 6
        assert [e["tid"] for e in links] == [2, 3] * 5 + [2]
        for before, after in itertools.pairwise(compute):
            assert before["ts"] <= after["ts"]
        for link, stretch in zip(links[:10], compute, strict=False):
            assert stretch["ts"] <= link["ts"], "it starts when its micro-batch comes to its point"


@pytest.mark.requirement("C11")
def test_the_report_adds_up(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = sums(json.loads(trace.read_text()))
    assert {"prompts, in micro-batches", "decode, in micro-batches", "all"} <= set(found)
    everything = found.pop("all")
    assert everything.steps == sum(one.steps for one in found.values())
    assert 0.0 <= everything.hidden <= everything.communication
    assert main([str(trace)]) == 0
    assert "| all |" in capsys.readouterr().out
    assert main([]) == 2


def test_a_trace_that_is_still_written_can_be_read(trace: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished.json"
    unfinished.write_text(trace.read_text().rstrip().rstrip("]"))
    assert main([str(unfinished)]) == 0


def test_a_trace_of_one_rank_has_no_tracks_of_micro_batches(tmp_path: Path) -> None:
    assert sums([{"cat": "step", "args": {"step": 1}}]) == {}
    assert table({}).count("\n") == 1
    assert Flight(0, 1.0, 2.0, 5.0).seconds == 3.0


def test_ranks_write_files_of_their_own() -> None:
    assert [trace_of("t.json", rank) for rank in range(3)] == ["t.json", "t.rank1.json", "t.rank2.json"]
    assert [trace_of("d/t.json", rank, "decode0") for rank in (0, 1)] == [
        "d/t.decode0.json",
        "d/t.decode0.rank1.json",
    ]
