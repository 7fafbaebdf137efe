"""Prefill and decode in groups of their own, as processes: files of ``examples/``, and the short form."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.launch.test_serve import Server, start
from tests.launch.test_up import EXAMPLES, Clients, engines, until
from tests.support.processes import is_alive
from tests.support.slowness import deadline

__all__ = ["start"]

PROMPTS = ("Tom has 12 apples.", "Ann buys 7 pens and 3 books. " * 20, "A train travels 60 miles. " * 90)


def answers(base: str) -> list[Any]:
    """What is said of some requests: greedy, with a seed, with choices, with logprobs."""
    said = []
    for number, prompt in enumerate(PROMPTS):
        for more in ({"temperature": 0}, {"temperature": 0.9, "seed": number, "n": 2, "logprobs": 1}):
            body = {"model": "spool-text", "prompt": prompt, "max_tokens": 20, **more}
            answer = httpx.post(f"{base}/v1/completions", json=body, timeout=deadline(120), verify=False)
            assert answer.status_code == 200, answer.text
            said.append([choice | {"logprobs": None} for choice in answer.json()["choices"]])
    return said


def metric(base: str, name: str) -> float:
    """The sum of a counter over all its labels."""
    text = httpx.get(f"{base}/metrics", verify=False).text
    return sum(float(value) for value in re.findall(rf"^weft:{name}\{{.*\}} (.*)$", text, re.MULTILINE))


def ends_in_order(server: Server) -> None:
    running = engines(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(deadline(60)) == 0, server.log.read_text()
    assert not any(is_alive(pid) for pid in running)
    assert [str(one) for one in Path(server.temporary).rglob("*")] == []


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one group that does everything answers."""
    server = Server(tmp_path_factory.mktemp("alone"), "spool-text", "--port", "0")
    try:
        return answers(server.url())
    finally:
        server.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param("1p1d", marks=pytest.mark.grid), pytest.param("tp2-prefill", marks=pytest.mark.slow)],
)
def test_roles_change_no_answer(name: str, start: Any, due: list[Any]) -> None:
    server = start(str(EXAMPLES / f"{name}.yaml"), "--port", "0", command="up")
    base = server.url()
    assert answers(base) == due
    assert metric(base, "front_pairs_total") >= 3 * len(PROMPTS)
    assert metric(base, "transfers_failed_total") == 0
    ends_in_order(server)


@pytest.mark.parametrize("pools", ["direct", pytest.param("staged", marks=pytest.mark.grid)])
def test_a_group_of_either_role_may_die(start: Any, pools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, under requests, of which none fails or changes; after each pairs work again."""
    if pools == "staged":
        monkeypatch.setenv("WEFT_STAGED_POOLS", "1")
    server = start(str(EXAMPLES / "1p2d.yaml"), "--port", "0", command="up")
    base = server.url()
    running = engines(server)
    with Clients(base) as clients:
        for role, pid in (("prefill", running[0]), ("decode", running[1])):
            before = len(clients.texts)
            until(server, lambda before=before: len(clients.texts) > before + 5)
            os.kill(pid, signal.SIGKILL)
            until(server, lambda role=role: f"engine {role}0 is back" in server.log.read_text())
            again = metric(base, "front_pairs_total")
            until(server, lambda again=again: metric(base, "front_pairs_total") > again + 5)
    assert not clients.errors
    assert len(set(clients.texts)) == 1
    ends_in_order(server)


def test_the_short_form_with_several_fronts_and_a_rolling_restart(start: Any, due: list[Any]) -> None:
    server = start(
        *(
            "spool-text",
            "--prefill",
            "1",
            "--decode",
            "1",
            "--max-num-seqs",
            "8",
            "--fronts",
            "2",
            "--port",
            "0",
        ),
        *("--role-timeout", str(deadline(30))),  # the only group of a role is restarted meanwhile
    )
    base = server.url()
    assert answers(base) == due
    before = engines(server)
    with Clients(base) as clients:
        until(server, lambda: len(clients.texts) > 3)
        server.process.send_signal(signal.SIGUSR1)
        until(server, lambda: "decode0 is restarted" in server.log.read_text())
    assert not clients.errors
    assert len(set(clients.texts)) == 1
    until(server, lambda: not any(is_alive(pid) for pid in before))
    ends_in_order(server)
