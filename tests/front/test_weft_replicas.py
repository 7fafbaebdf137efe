"""``weft serve`` over several replicas: bursts, idle times, and the death of an engine."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
from typing import Any

import httpx
import pytest

from tests.support.processes import with_role
from tests.support.slowness import deadline

COMMON = (
    "--data-parallel-size",
    "2",
    "--dtype",
    "float64",
    "--kv-cache-memory",
    "64M",
    "--rank-timeout",
    "20",
)
SHARED = ("spool-mla", *COMMON, "--enable-expert-parallel", "--max-num-seqs", "2")
PATIENCE = deadline(180.0)
"""Maximum seconds, even on a loaded machine."""
QUESTIONS = [f"Tom has {n} apples and buys {n + 3} more. How many apples does he have?" for n in range(2, 8)]
LONG: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}


def by_engine(server: Any, name: str) -> list[float]:
    text = server.http.get("/metrics").text
    return [float(v) for _, v in sorted(re.findall(rf'^weft:{name}{{head="(\d+)".*}} (\S+)$', text, re.M))]


def engines(server: Any) -> list[int]:
    return with_role(server.process.pid, "head")


def ask(server: Any, number: int) -> list[str]:
    """Every second one is sampled, twice."""
    own = {"temperature": 1.0, "seed": number, "n": 2} if number % 2 else {"temperature": 0}
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": QUESTIONS[number]}],
        **LONG,
        **own,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


def burst(server: Any) -> list[list[str]]:
    with concurrent.futures.ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(lambda number: ask(server, number), range(len(QUESTIONS))))


def idle(server: Any) -> bool:
    return bool(server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0)


def check_death(server: Any, wanted: list[list[str]], death: signal.Signals) -> None:
    """Assert that a burst gives the same texts when an engine dies, and both replicas serve afterwards."""
    victim = engines(server)[-1]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made = pool.submit(burst, server)
        # engines report their count later
        server.wait(lambda: server.metric("front_sequences") >= 6, PATIENCE)
        os.kill(victim, death)
        assert made.result(PATIENCE) == wanted
    server.wait(lambda: by_engine(server, "engine_up") == [1.0, 1.0], PATIENCE)
    assert server.http.get("/health").json() == {"status": "alive"}
    assert server.metric("front_failovers_total") >= 1
    assert len(engines(server)) == 2
    assert victim not in engines(server)
    assert burst(server) == wanted
    server.wait(lambda: idle(server), 20)
    assert server.metric("free_slots") == 2 * 2


@pytest.mark.grid
def test_independent_replicas(start_weft: Any) -> None:
    server = start_weft("spool-text", *COMMON, "--max-num-seqs", "2")
    wanted = burst(server)
    assert min(by_engine(server, "generation_tokens_total")) > 0
    check_death(server, wanted, signal.SIGKILL)
    assert sum(by_engine(server, "engine_idle_steps_total")) == 0
    assert server.stop() == 0


@pytest.mark.requirement("A16", "C1", "F44")
@pytest.mark.slow
@pytest.mark.parametrize(
    "death", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.grid)], ids=lambda d: d.name
)
def test_replicas_that_share_experts(start_weft: Any, death: signal.Signals) -> None:
    """Two slots per replica and nine concurrent sequences; a single request; an engine that dies."""
    server = start_weft(*SHARED)
    wanted = burst(server)
    assert ask(server, 0) == wanted[0]  # the other replica has nothing to do, and takes part
    server.wait(lambda: min(by_engine(server, "engine_idle_steps_total")) > 0, 10)
    server.wait(lambda: idle(server), 10)
    check_death(server, wanted, death)
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.requirement("E32")
def test_choices_of_an_engine_know_what_engines_have_cached(start_weft: Any) -> None:
    """Prompts go to the engine with the cached prefix. A restarted engine reports an empty cache."""
    server = start_weft(*COMMON, "--block-size", "16", "--max-num-seqs", "4")
    texts = [f"Question {n}: " + QUESTIONS[n % 6] * 2 for n in range(4)]

    def cached(text: str) -> int:
        answer = server.complete(prompt=text, max_tokens=1, temperature=0)
        assert answer.status_code == 200, answer.text
        tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [cached(text) for text in texts] == [0] * 4
    assert all(cached(text) >= 16 for text in texts)
    os.kill(engines(server)[-1], signal.SIGKILL)
    server.wait(lambda: by_engine(server, "engine_up").count(1.0) == 1, PATIENCE)
    server.wait(lambda: by_engine(server, "engine_up") == [1.0, 1.0], PATIENCE)
    for _ in range(24):
        for text in texts:
            cached(text)
    assert all(cached(text) >= 16 for text in texts)
    text = server.http.get("/metrics").text
    counts = re.findall(r'^weft:routing_decisions_total{knew="(\w+)".*} (\S+)$', text, re.M)
    decisions = {what: float(number) for what, number in counts}
    assert decisions["exact"] >= 100
    assert decisions["degraded"] + decisions["fallback"] <= 0.01 * sum(decisions.values())
