"""A minute of ``bench.soak``, and its definition of a correct answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.soak import Answer, soak
from tests.support.slowness import deadline


@pytest.mark.requirement("E20")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "pools", [pytest.param("direct", marks=pytest.mark.slow), pytest.param("staged", marks=pytest.mark.grid)]
)
def test_groups_that_die_and_clients_that_leave_cost_no_answer_and_no_block(
    tmp_path: Path, pools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pools == "staged":
        monkeypatch.setenv("WEFT_STAGED_POOLS", "1")
    run = soak(36, tmp_path / "log", seed=12, clients=6, every=deadline(1.5), deadline=deadline(250.0))
    assert not run.wrong, "\n".join([*run.wrong[:5], (tmp_path / "log").read_text()[-4000:]])
    assert run.counts["answered"] + run.counts["left"] == 36
    assert run.counts["left"] >= 1  # other clients got their answers before their time to leave
    assert sum(count for what, count in run.counts.items() if what.startswith("killed")) >= 1


@pytest.mark.requirement("D26")
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("requests", "kills"),
    [pytest.param(100, 1, marks=pytest.mark.slow), pytest.param(400, 3, marks=pytest.mark.grid)],
)
def test_groups_that_encode_images_may_die_among_others(tmp_path: Path, requests: int, kills: int) -> None:
    log = tmp_path / "log"
    run = soak(requests, log, seed=7, clients=10, every=deadline(6.0), deadline=deadline(600.0), images=True)
    assert not run.wrong, "\n".join([*run.wrong[:5], log.read_text()[-4000:]])
    assert run.counts["answered"] + run.counts["left"] == requests
    assert sum(count for what, count in run.counts.items() if what.startswith("killed")) >= kills


def event(index: int, text: str, finish: str | None = None) -> str:
    choice = {"index": index, "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}"


def test_events_of_a_stream_are_taken_once() -> None:
    answer = Answer()
    for line in (event(0, "a"), event(1, "b", "stop"), ": keep-alive", "", event(0, "c", "length")):
        answer.take(line)
    assert answer.said == [(0, "ac", "length"), (1, "b", "stop")]
    with pytest.raises(ValueError, match="choice 1 goes on after its end"):
        answer.take(event(1, "d"))
    assert not answer.over
    answer.take("data: [DONE]")
    assert answer.over
    with pytest.raises(ValueError, match="after the end of its stream"):
        answer.take("data: [DONE]")
    with pytest.raises(ValueError, match="error event"):
        Answer().take('data: {"error": {"message": "no"}}')
