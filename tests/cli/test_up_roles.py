"""Separate prefill and decode groups as processes: files of ``examples/``, and the short form."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_serve import Server, start
from tests.cli.test_up import EXAMPLES, Clients, engines, until
from tests.support.processes import is_alive
from tests.support.slowness import deadline

__all__ = ["start"]

PROMPTS = ("Tom has 12 apples.", "Ann buys 7 pens and 3 books. " * 20, "A train travels 60 miles. " * 90)


def answers(base: str) -> list[Any]:
    """Return the answers to requests: greedy, seeded, with choices, with logprobs."""
    said = []
    for number, prompt in enumerate(PROMPTS):
        for more in ({"temperature": 0}, {"temperature": 0.9, "seed": number, "n": 2, "logprobs": 1}):
            body = {"model": "spool-text", "prompt": prompt, "max_tokens": 20, **more}
            answer = httpx.post(f"{base}/v1/completions", json=body, timeout=deadline(120), verify=False)
            assert answer.status_code == 200, answer.text
            said.append([choice | {"logprobs": None} for choice in answer.json()["choices"]])
    return said


def metric(base: str, name: str) -> float:
    """Return the sum of a counter over all labels."""
    text = httpx.get(f"{base}/metrics", verify=False).text
    return sum(float(value) for value in re.findall(rf"^weft:{name}\{{.*\}} (.*)$", text, re.MULTILINE))


def ends_in_order(server: Server) -> None:
    running = engines(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(deadline(60)) == 0, server.log.read_text()
    assert not any(is_alive(pid) for pid in running)
    assert [str(one) for one in Path(server.temporary).rglob("*")] == []


def ends_with_first_tokens(server: Server, base: str) -> None:
    """Assert that requests with a single token do not count as evictions."""
    body = {"model": "spool-text", "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=base, timeout=deadline(60)) as http:
        for number in range(40):
            one = {**body, "prompt": f"Tom has {number} pens", "max_tokens": 1}
            assert http.post("/v1/completions", json=one).status_code == 200
        before = metric(base, "transfers_done_total")
        two = {**body, "prompt": "Ann has 7 books", "max_tokens": 2}
        assert http.post("/v1/completions", json=two).status_code == 200
    until(
        server, lambda: metric(base, "transfers_done_total") >= before + 2
    )  # both heads have reported since
    assert metric(base, "transfers_evictions_total") == 0


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the answers of a unified group."""
    server = Server(tmp_path_factory.mktemp("alone"), "spool-text", "--port", "0")
    try:
        return answers(server.url())
    finally:
        server.close()


@pytest.mark.requirement("E22")
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


@pytest.mark.slow
@pytest.mark.requirement("E15", "E16")
@pytest.mark.parametrize("pools", ["direct", pytest.param("staged", marks=pytest.mark.grid)])
def test_a_group_of_either_role_may_die(start: Any, pools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of each role dies under requests in turn. No answer fails or changes, and pairs work again
    afterwards.
    """
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


@pytest.mark.slow
@pytest.mark.requirement("E19")
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
        *("--role-timeout", "0.2", "--prefill-fallback", "none"),  # far less than a restart takes
    )
    base = server.url()
    assert answers(base) == due
    ends_with_first_tokens(server, base)
    before = engines(server)
    with Clients(base) as clients:
        until(server, lambda: len(clients.texts) > 3)
        server.process.send_signal(signal.SIGUSR1)
        until(server, lambda: "decode0 is restarted" in server.log.read_text())
    assert not clients.errors
    assert len(set(clients.texts)) == 1
    until(server, lambda: not any(is_alive(pid) for pid in before))
    ends_in_order(server)


MOST_TOKENS = 2000
LONG_S, LOAD_S = 20.0, 30.0
"""Seconds of a stream, and of a successor's load: each is more than the default time-out for a role."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_planned_restart_of_one_group_of_each_role_refuses_no_request(start: Any) -> None:
    """The streams are long, and the successors load slowly: they are stopped for a while."""
    flags = "--prefill 1 --decode 1 --spare-processes 0 --prefill-fallback none --max-num-seqs 32 --port 0"
    flags += " --rank-timeout 90"  # a successor may already listen when it is stopped
    server = start("spool-text", "--dtype", "float64", *flags.split())
    base = server.url()
    body = {"model": "spool-text", "prompt": "Tom has 12", "temperature": 0, "ignore_eos": True, "n": 12}
    rate = tokens_per_second(base, body)
    long = {**body, "max_tokens": min(int(rate * LONG_S), MOST_TOKENS)}
    before = set(engines(server))
    with Clients(base) as clients, ThreadPoolExecutor(2) as pool:
        streams = [
            pool.submit(httpx.post, f"{base}/v1/completions", json=long, timeout=600) for _ in range(2)
        ]
        until(server, lambda: len(clients.texts) > 3)
        server.process.send_signal(signal.SIGUSR1)
        for group in ("prefill0", "decode0"):
            until(server, lambda: bool(set(engines(server)) - before), 180)
            (successor,) = set(engines(server)) - before
            os.kill(successor, signal.SIGSTOP)
            time.sleep(LOAD_S)
            os.kill(successor, signal.SIGCONT)
            until(server, lambda group=group: f"{group} is restarted" in server.log.read_text(), 180)
            before.add(successor)
        texts = [stream.result().json()["choices"][0]["text"] for stream in streams]
        done = len(clients.texts)
        until(server, lambda: len(clients.texts) > done + 5)
    assert not clients.errors
    assert len(set(clients.texts)) == 1
    assert texts[0] == texts[1]
    ends_in_order(server)


def tokens_per_second(base: str, body: dict[str, Any]) -> float:
    """Return the tokens per second of one stream beside another stream."""
    began, count = time.monotonic(), 100
    with ThreadPoolExecutor(2) as pool:
        asked = {**body, "max_tokens": count}
        both = [pool.submit(httpx.post, f"{base}/v1/completions", json=asked, timeout=600) for _ in range(2)]
        assert [one.result().status_code for one in both] == [200, 200]
    return count / (time.monotonic() - began)
