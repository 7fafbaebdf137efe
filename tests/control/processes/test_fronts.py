"""Several API servers share engines and a port: each can die, and the others' streams continue.

API servers run under a real supervisor; their engines are scripted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.front.conftest import Running
from tests.support.processes import children, is_alive, serving_process, with_role
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.control.processes.process_registry import ProcessRecord, RegistryReader

PROMPT = "abcdefgh"
LENGTH = 400
PATIENCE = 180.0
"""Maximum seconds, even on a loaded machine."""


def fronts(server: Running) -> list[int]:
    return with_role(server.process.pid, "front")


class Stream:
    """A request in streaming, and the API server that answers it."""

    def __init__(self, server: Running, client: httpx.Client, answer: httpx.Response, front: int) -> None:
        self.front, self._lines = front, answer.iter_lines()
        self.text = ""
        self.done = False

    def read(self, characters: int = 1 << 30) -> str:
        """Read until the text has ``characters`` characters, or to the end. Raise httpx errors."""
        while not self.done and len(self.text) < characters:
            line = next(self._lines, None)
            assert line is not None, "the stream ended without its end"
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                self.text += event["choices"][0]["text"]
        return self.text


class Connection(NamedTuple):
    """A kept connection to a known API server."""

    client: httpx.Client
    port: int
    front: int


@contextlib.contextmanager
def connection_to(server: Running, wanted: set[int]) -> Iterator[Connection]:
    """Yield a connection to one of the ``wanted`` API servers. The kernel chooses, so retry connections."""
    for _ in range(200):
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            with client.stream("GET", "/live") as probe:
                probe.read()
                port = probe.extensions["network_stream"].get_extra_info("client_addr")[1]
                front = serving_process(port, fronts(server))
            if front in wanted:
                yield Connection(client, port, front)
                return
    raise AssertionError("no connection came to that front")


@contextlib.contextmanager
def stream_on(server: Running, at: Connection, **fields: Any) -> Iterator[Stream]:
    """Yield a stream on a connection."""
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": LENGTH, "stream": True, **fields}
    with at.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        used = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        assert used == at.port, "the connection was not kept"
        yield Stream(server, at.client, answer, at.front)


@contextlib.contextmanager
def stream_at(server: Running, wanted: set[int], **fields: Any) -> Iterator[Stream]:
    """Yield a stream on one of the ``wanted`` API servers."""
    with connection_to(server, wanted) as at, stream_on(server, at, **fields) as stream:
        yield stream


def whole() -> str:
    return (PROMPT * LENGTH)[:LENGTH]


def engines(server: Running) -> list[ProcessRecord]:
    """Return the engines in the registry."""
    (pid, *_) = fronts(server)
    for path in Path("/tmp").glob("weft-*/registry"):
        reader = RegistryReader(path.parent)
        if any(record.pid == pid for record in reader.read().of("front")):
            return reader.read().of("head")
    raise AssertionError("no registry names the front")


def ask_again(server: Running) -> str:
    """Return the text for a client that retries, like OpenAI's clients."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=5, timeout=PATIENCE)
    made = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=LENGTH)
    return made.choices[0].text


@pytest.mark.slow
@pytest.mark.requirement("E35")
@pytest.mark.real_processes
def test_both_serve_and_one_dies(start_fake: Any) -> None:
    """The other server's 400 tokens arrive; the dead server returns; its clients get all tokens elsewhere."""
    server = start_fake(fronts=2, restarts=3)
    one, other = fronts(server)
    with stream_at(server, {one}) as stays, stream_at(server, {other}) as breaks:
        stays.read(10)
        breaks.read(10)
        os.kill(other, signal.SIGKILL)
        with pytest.raises((httpx.HTTPError, AssertionError)):
            breaks.read()
        assert ask_again(server) == whole()
        assert stays.read() == whole()
    asked: list[int] = []  # no connection goes to a server that cannot answer yet

    def is_back() -> bool:
        asked.append(httpx.get(f"{server.url}/ready", timeout=PATIENCE).status_code)
        pages = re.findall(r'^weft:front_sequences{front="(\d)"', server.http.get("/metrics").text, re.M)
        return len(pages) == 2 and len(fronts(server)) == 2 and other not in fronts(server)

    server.wait(is_back, PATIENCE)
    assert set(asked) == {200}
    (back,) = set(fronts(server)) - {one}

    def at_the_new_one() -> bool:
        with contextlib.suppress(AssertionError), stream_at(server, {back}) as stream:
            return stream.read() == whole()
        return False

    server.wait(at_the_new_one, PATIENCE)
    assert [record.incarnation for record in engines(server)] == [1]
    # Whichever is scraped answers for both.
    page = server.http.get("/metrics").text
    counted = re.findall(r'^weft:request_success_total{.*front="(\d)".*} (\S+)$', page, re.M)
    assert {front for front, _ in counted} == {"0", "1"}
    assert page.count("# TYPE weft:request_success_total ") == 1
    assert re.findall(r'^weft:engine_up{head="0",model_name="fake",role="unified"} 1.0$', page, re.M)
    # The engine has dropped the sequences of the dead API server.
    server.wait(lambda: server.metric("num_requests_running") == 0, PATIENCE)
    assert server.stop(seconds=PATIENCE) == 0


def test_both_say_what_they_are_and_a_signal_drains_both(start_fake: Any) -> None:
    server = start_fake(fronts=2)
    one, other = fronts(server)
    if importlib.util.find_spec("setproctitle"):
        titles = [Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0").decode() for pid in (one, other)]
        assert titles == ["weft: front 0 (fake)", "weft: front 1 (fake)"]
    with stream_at(server, {one}) as first, stream_at(server, {other}) as second:
        first.read(5)
        second.read(5)
        server.process.send_signal(signal.SIGTERM)
        assert first.read() == whole()
        assert second.read() == whole()
    assert server.process.wait(PATIENCE) == 0
    assert not is_alive(one)
    assert not is_alive(other)


@pytest.mark.slow
def test_a_second_signal_cuts(start_fake: Any, script: Any) -> None:
    server = start_fake(fronts=2)
    pids = fronts(server)
    with stream_at(server, set(pids), seed=script.HANG_AFTER) as stream:
        stream.read(3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 130
    assert not any(map(is_alive, pids))


@mostly_slow("death", [signal.SIGKILL, signal.SIGSTOP], [signal.SIGKILL], ids=lambda d: d.name)
@pytest.mark.slow
def test_an_engine_dies_once_for_all_fronts(start_fake: Any, death: signal.Signals) -> None:
    """Streams of both API servers continue. A stopped engine is noticed only by API servers and replaced
    once.
    """
    server = start_fake(fronts=2, restarts=3, engine_timeout=deadline(5.0))
    one, other = fronts(server)
    with stream_at(server, {one}) as first, stream_at(server, {other}) as second:
        first.read(10)
        second.read(10)
        (engine,) = engines(server)
        assert engine.pid is not None
        os.kill(engine.pid, death)
        assert first.read() == whole()
        assert second.read() == whole()
    time.sleep(1.0)  # wait for late reports
    assert [record.incarnation for record in engines(server)] == [2]
    assert fronts(server) == [one, other]
    assert not is_alive(engine.pid)
    assert server.stop(seconds=PATIENCE) == 0


def test_the_server_ends_when_no_engine_is_left(start_fake: Any, script: Any) -> None:
    server = start_fake(fronts=2, restarts=0)
    pids = fronts(server)
    with stream_at(server, set(pids), seed=script.HANG_AFTER) as stream:
        stream.read(3)
        (engine,) = engines(server)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(AssertionError, match="engine_dead"):
            stream.read()
    assert server.process.wait(PATIENCE) == 1
    assert not any(map(is_alive, pids))


@mostly_slow("count", [1, 2], [2])
def test_an_engine_that_was_given_up_is_revived(start_fake: Any, count: int) -> None:
    """Both the route and the command revive, also for an API server that started while the engine was
    retired.
    """
    server = start_fake(fronts=count, engines=2, restarts=0 if count == 1 else 1, admin_key=["admin"])
    pid = server.process.pid

    def up(number: int) -> bool:
        found = re.findall(r"^weft:engine_up\{.*\} (.*)$", server.http.get("/metrics").text, re.M)
        return sorted(map(float, found)) == [0.0] * (2 - number) + [1.0] * number

    if count == 1:
        victims = [
            child for child in children(pid) if "fake_engine" in Path(f"/proc/{child}/cmdline").read_text()
        ]
        os.kill(victims[0], signal.SIGKILL)
    else:
        for _ in range(2):  # the budget of both heads together
            os.kill(next(one.pid for one in engines(server) if one.name == "0"), signal.SIGKILL)
            server.wait(lambda: engines(server)[0].incarnation == 2, PATIENCE)
        server.wait(lambda: engines(server)[0].state == "retired", PATIENCE)
        before = fronts(server)
        os.kill(before[0], signal.SIGKILL)  # the next one joins
        server.wait(lambda: len(fronts(server)) == 2 and fronts(server) != before, PATIENCE)
    server.wait(lambda: up(1), PATIENCE)
    command = [sys.executable, "-m", "weft", "revive", "--url", str(server.http.base_url)]
    ran = subprocess.run(
        [*command, "--admin-key", "admin", "1"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no engine of '1' is retired" in ran.stderr
    ran = subprocess.run(
        [*command, "--admin-key", "admin", "0"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "starting 0\n", "")
    for _ in range(8):  # any API server may answer
        server.wait(lambda: up(2), PATIENCE)
    assert server.http.get("/health").json()["status"] == "alive"
    assert server.stop(seconds=PATIENCE) == 0


def test_a_front_that_cannot_start_ends_the_server_with_its_status(start_fake: Any) -> None:
    with pytest.raises(AssertionError, match="the server ended"):
        start_fake(fronts=2, chat_template="/nowhere/template.jinja")
