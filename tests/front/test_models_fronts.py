"""Several models behind several API servers, over scripted engines: deaths, and the states of models."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.control.processes.test_fronts import Stream, connection_to, stream_on
from tests.front.test_several_models import ADMIN, Start, admin, ask, listed, says, starter, states, stopped
from tests.support.processes import serving_process, with_role
from tests.support.servers import Running, Servers
from tests.support.slowness import deadline, until

pytestmark = pytest.mark.slow

LETTERS = 60
SLOW = {"text": "x" * LETTERS, "delay_ms": 50, "repeat": True}


@pytest.fixture(scope="module")
def start(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a function that starts a server: see ``starter``."""
    return starter(servers, tmp_path_factory, fronts=2)


def fronts(server: Running) -> list[int]:
    return with_role(server.process.pid, "front")


def told(server: Running, front: int, path: str) -> Any:
    """Return the answer of one API server. The kernel chooses the API server, so retry connections."""
    for _ in range(200):
        with (
            # An API server that stands still does not answer, and resets connections at its end.
            contextlib.suppress(httpx.TransportError),
            httpx.Client(base_url=server.url, timeout=2.0) as client,
            client.stream("GET", path, headers=ADMIN) as answer,
        ):
            answer.read()
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            if serving_process(port, fronts(server)) == front:
                return answer.json()
    raise AssertionError("no connection came to that API server")


def same(server: Running) -> bool:
    """Return True if all API servers tell the same of the models."""
    for path in ("/admin/models", "/v1/models", "/api/ps"):
        answers = [told(server, front, path) for front in fronts(server)]
        if any(answer != answers[0] for answer in answers):
            return False
    return True


@pytest.fixture
def streams(start: Start) -> Iterator[tuple[Running, Stream, Stream]]:
    """A server with two API servers, memory for one of two models, and a stream at each API server."""
    models: dict[str, dict[str, Any]] = {name: {"memory": "1G"} for name in "ab"}
    models["a"]["says"] = SLOW
    server = start(models, models_memory="1G", engine_restarts=5)
    one, other = fronts(server)
    with (
        # Both connections come first: the streams last 3 s.
        connection_to(server, {one}) as at_one,
        connection_to(server, {other}) as at_other,
        stream_on(server, at_one, model="a") as first,
        stream_on(server, at_other, model="a") as second,
    ):
        first.read(2)
        second.read(2)
        # The API servers tell each other their counts every 0.4 s. A test that stops one before would stop it
        # with a count of 0.
        with stopped(server):
            until(lambda: told(server, one, "/admin/models")["models"][0]["running"] == 2)
            until(lambda: told(server, other, "/admin/models")["models"][0]["running"] == 2)
        yield server, first, second


def test_one_api_server_dies_and_the_stream_of_the_other_goes_on(
    streams: tuple[Running, Stream, Stream],
) -> None:
    server, stays, breaks = streams
    with ThreadPoolExecutor(1) as pool:
        with stopped(server):
            assert admin(server, "unload", "a").json()["state"] == "draining"
            os.kill(breaks.front, signal.SIGKILL)
            with pytest.raises((httpx.HTTPError, AssertionError)):
                breaks.read()
            waits = pool.submit(ask, server, "b")
            until(lambda: listed(server)[0]["running"] == 1)
            now = states(server)
            assert now == {"a": "draining", "b": "unloaded"}, "a has a stream at the other API server"
        assert stays.read() == "x" * LETTERS
        assert says(waits.result()) == "I am b"
    until(lambda: len(fronts(server)) == 2 and breaks.front not in fronts(server))
    until(lambda: same(server))
    assert states(server) == {"a": "unloaded", "b": "loaded"}
    assert server.metric("model_memory_bytes") == 1 << 30


def test_an_api_server_that_stands_still_keeps_no_model_for_ever(
    streams: tuple[Running, Stream, Stream],
) -> None:
    """The supervisor replaces the process after 30 s. Then the model is unloaded."""
    server, stays, breaks = streams
    with stopped(server):
        assert admin(server, "unload", "a").json()["state"] == "draining"
        os.kill(breaks.front, signal.SIGSTOP)
    assert stays.read() == "x" * LETTERS
    began = time.monotonic()
    shown = told(server, stays.front, "/admin/models")["models"][0]
    while shown["running"] == 2:  # counts are up to 0.4 s old
        assert time.monotonic() < began + deadline(5)
        shown = told(server, stays.front, "/admin/models")["models"][0]
    assert (shown["state"], shown["running"]) == ("draining", 1)
    while shown["state"] != "unloaded":
        assert time.monotonic() < began + deadline(60)
        time.sleep(0.5)
        shown = told(server, stays.front, "/admin/models")["models"][0]
    assert breaks.front not in fronts(server)


def test_the_engine_of_a_model_dies_and_streams_at_both_api_servers_continue(
    streams: tuple[Running, Stream, Stream],
) -> None:
    server, one, other = streams
    (engine,) = with_role(server.process.pid, "head")
    os.kill(engine, signal.SIGKILL)
    assert one.read() == other.read() == "x" * LETTERS
    assert server.metric("model_loads_total") == 1, "an engine that starts again is no load"


def test_a_model_that_does_not_load_ends_the_start_of_all_api_servers(start: Start) -> None:
    with pytest.raises(AssertionError, match="the server ended"):
        start({"a": {}, "b": {"scripted": "/no/such/file"}})
