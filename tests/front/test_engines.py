"""One API server over several engines: load, metrics, health, and streams that survive a dead engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import with_role
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.control.fleet.instance_table import Patience
from weft.control.links.link import Address
from weft.control.links.links import Links
from weft.control.processes.engine_owner import EngineOwner


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def by_engine(server: Any, name: str) -> dict[str, float]:
    text = server.http.get("/metrics").text
    return {h: float(v) for h, v in re.findall(rf'^weft:{name}{{head="(\d+)".*}} (\S+)$', text, re.M)}


def children(server: Any) -> list[int]:
    return with_role(server.process.pid, "head")


def test_requests_spread_by_load_and_metrics_tell_the_engines_apart(start_fake: Any, script: Any) -> None:
    server = start_fake(engines=2, drain_timeout=0)
    assert server.http.get("/health").json() == {"status": "alive"}
    assert by_engine(server, "engine_up") == {"0": 1.0, "1": 1.0}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        hanging = [
            pool.submit(lambda: server.complete("abc", seed=script.HANG_AFTER, max_tokens=9).status_code)
            for _ in range(6)
        ]
        server.wait(lambda: by_engine(server, "num_requests_running") == {"0": 3.0, "1": 3.0}, 20)
        assert server.metric("front_sequences") == 6
        assert text_of(server.complete("abc", max_tokens=5)) == "abcab"
        server.stop(signal.SIGINT)
        assert {one.result() for one in hanging} == {503}


def test_choices_of_one_prompt_go_to_one_engine(start_fake: Any, script: Any) -> None:
    server = start_fake(engines=2)
    with server.stream("/v1/completions", prompt="abc", n=4, seed=script.HANG_AFTER, max_tokens=9):
        server.wait(lambda: sorted(by_engine(server, "num_requests_running").values()) == [0.0, 4.0], 20)
    with server.stream("/v1/completions", prompt=["abc", "abd"], seed=script.HANG_AFTER, max_tokens=9):
        server.wait(lambda: sorted(by_engine(server, "num_requests_running").values()) == [1.0, 1.0], 20)


@pytest.mark.parametrize("restarts", [0, 1])
def test_streams_go_on_at_another_engine(start_fake: Any, script: Any, sse: Any, restarts: int) -> None:
    server = start_fake(engines=2, restarts=restarts)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(server.complete, "abcdefg", max_tokens=300) for _ in range(4)]
        fields = {"prompt": "xyz", "seed": script.DIE_ONCE, "max_tokens": 50, "logprobs": 1}
        with server.stream("/v1/completions", **fields) as answer:
            events = sse(answer)
        assert events[-1] == "[DONE]"
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == ("xyz" * 17)[:50]
        assert sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in events[:-1]) == 50
        assert {text_of(other.result(deadline(60))) for other in others} == {("abcdefg" * 43)[:300]}
    assert server.metric("front_failovers_total") >= 1
    if restarts:
        server.wait(lambda: server.http.get("/health").json() == {"status": "alive"}, 20)
        assert sorted(by_engine(server, "engine_up").values()) == [1.0, 1.0]
    else:
        health = server.http.get("/health")
        missing = {"unified": 1}
        assert (health.status_code, health.json()) == (200, {"status": "degraded", "missing": missing})
        assert server.http.get("/ready").json() == {"status": "ready", "missing": missing}
        assert sorted(by_engine(server, "engine_up").values()) == [0.0, 1.0]
    assert text_of(server.complete("abc", max_tokens=5)) == "abcab"


def test_an_engine_that_returns_is_no_longer_taken_to_have_prefixes(start_fake: Any, script: Any) -> None:
    """A restarted engine has an empty cache, so its earlier prompt goes to the least used engine."""
    server = start_fake(engines=2, restarts=1)
    fields = {"prompt": "abcd" * 50, "max_tokens": 9, "seed": script.HANG_AFTER}

    def home() -> dict[str, float]:
        with server.stream("/v1/completions", **fields):
            server.wait(lambda: sum(by_engine(server, "num_requests_running").values()) == 1, 20)
            found = by_engine(server, "num_requests_running")
        server.wait(lambda: sum(by_engine(server, "num_requests_running").values()) == 0, 20)
        return found

    assert home() == {"0": 1.0, "1": 0.0}
    assert home() == {"0": 1.0, "1": 0.0}  # chosen for its prefix: the other engine was used less often
    os.kill(children(server)[0], signal.SIGKILL)
    server.wait(lambda: server.metric("engine_restarts_total") == 1, 20)
    server.wait(lambda: by_engine(server, "engine_up") == {"0": 1.0, "1": 1.0}, 20)
    assert home() == {"0": 0.0, "1": 1.0}


def test_a_lone_engine_that_returns_goes_on_with_its_streams(start_fake: Any, script: Any) -> None:
    server = start_fake(restarts=1)
    made = server.complete("xyz", seed=script.DIE_ONCE, max_tokens=20, n=2)
    assert made.status_code == 200, made.text
    assert [choice["text"] for choice in made.json()["choices"]] == [("xyz" * 7)[:20]] * 2
    assert server.metric("front_sequences") == 0


def test_a_request_that_kills_every_engine_ends(start_fake: Any, script: Any) -> None:
    """The request fails before it has killed more engines than a sequence may lose; the last engine
    survives.
    """
    server = start_fake(engines=3, restarts=2)
    made = server.complete("xyz", seed=script.DIE, max_tokens=9)
    assert made.status_code == 500
    assert "lost" in json.dumps(made.json())
    assert text_of(server.complete("abc", max_tokens=5)) == "abcab"


def test_the_server_ends_when_the_last_engine_dies(start_fake: Any, script: Any) -> None:
    server = start_fake(engines=2)
    with server.stream("/v1/completions", prompt="abc", seed=script.HANG_AFTER, max_tokens=9) as answer:
        lines = answer.iter_lines()
        next(lines)
        for child in children(server):
            os.kill(child, signal.SIGKILL)
        error = json.loads([line for line in lines if line][-1].removeprefix("data: "))
        assert error["error"]["code"] == "engine_dead", error
    assert server.process.wait(deadline(20)) == 1


@pytest.mark.requirement("F40")
@pytest.mark.parametrize(
    ("engines", "together", "state"),
    [(1, False, "recovering"), (2, False, "degraded"), (2, True, "recovering")],
)
def test_health_while_an_engine_is_started_again(
    start_fake: Any, tmp_path: Path, engines: int, together: bool, state: str
) -> None:
    """/health stays 200 during recovery, so that no outside watchdog restarts the server."""
    loaded = tmp_path / "loaded"
    loaded.touch()
    server = start_fake(engines=engines, together=together, restarts=1, loaded=[str(loaded)])
    loaded.unlink()  # the next engine loads until the file exists again
    os.kill(children(server)[0], signal.SIGKILL)
    server.wait(lambda: sum(by_engine(server, "engine_up").values()) == engines - 1, 20)
    found = {"status": state, "missing": {"unified": 1}}
    for route, told in (("/health", found), ("/ping", found), ("/live", {"status": "alive"})):
        answer = server.http.get(route)
        assert (answer.status_code, answer.json()) == (200, told)
    loaded.touch()
    server.wait(lambda: server.http.get("/health").json() == {"status": "alive"}, 20)
    assert text_of(server.complete("abc", max_tokens=5)) == "abcab"


@pytest.mark.parametrize("restarts", [0, 1])
def test_engines_that_need_each_other(start_fake: Any, script: Any, sse: Any, restarts: int) -> None:
    """Sequences wait until all engines are present. If one is lost for good, all are, and every client gets
    an error.
    """
    server = start_fake(engines=2, restarts=restarts, together=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        other = pool.submit(
            server.complete, "abcdefg", seed=0 if restarts else script.HANG_AFTER, max_tokens=300
        )
        server.wait(lambda: server.metric("num_requests_running") == 1, 20)
        fields = {"prompt": "xyz", "seed": script.DIE_ONCE, "max_tokens": 50}
        with server.stream("/v1/completions", **fields) as answer:
            events = sse(answer)
        if restarts:
            assert "".join(e["choices"][0]["text"] for e in events[:-1]) == ("xyz" * 17)[:50]
            assert text_of(other.result(deadline(60))) == ("abcdefg" * 43)[:300]
            assert server.metric("front_failovers_total") == 1
        else:
            assert events[-1]["error"]["code"] == "engine_dead"
            assert other.result(deadline(60)).status_code == 500
            assert server.process.wait(deadline(20)) == 1


def test_an_engine_that_never_listens_is_given_up(tmp_path: Path) -> None:
    """An engine may be stopped right after its start."""

    class Stopped:
        def poll(self) -> None:
            return None

        def start(self, name: str, incarnation: int) -> Address:
            return Address(f"ipc://{tmp_path}/nobody", self, None, incarnation)

        def kill(self, name: str, incarnation: int) -> None: ...

    async def run() -> None:
        owner = EngineOwner(["0"], Stopped(), 0)
        owner.start()
        links = Links(owner, Patience(listen=0.3))
        with pytest.raises(EngineDead, match="does not listen"):
            await asyncio.wait_for(links.start(), 30)
        await links.close()

    asyncio.run(run())
