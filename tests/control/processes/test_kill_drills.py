"""``weft serve --fronts 2`` on the bundled model, killed part by part; and API servers started by a test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.control.processes.test_fronts import PATIENCE, fronts, stream_at
from tests.front.fake_server import FakeEngines, engine_config, write_tokenizer
from tests.support.processes import children, is_alive, with_role
from weft.cli.processes.front_main import FrontSetup, start_front
from weft.common.folder import private_folder
from weft.config.sections.all import FrontSection
from weft.control.processes import channel, process_registry
from weft.front.front_server import bind

LONG = {"prompt": "Tom has 12 apples and buys 7 more.", "max_tokens": 150, "ignore_eos": True}
FLAGS = ("--fronts", "2", "--dtype", "float64", "--device", "cpu", "--rank-timeout", "20")


def insistent(server: Any) -> httpx.Response:
    """Return the answer for a client that retries after a broken connection, like OpenAI's clients."""
    for _ in range(20):
        try:
            made: httpx.Response = server.complete(**{**LONG, "temperature": 0})
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return made
    raise AssertionError("no front answers")


@pytest.mark.slow
@pytest.mark.requirement("E35")
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_a_killed_process_of_any_role_loses_no_stream(start_weft: Any, tensor: int) -> None:
    """An API server, an engine or a worker dies: streams of other processes complete with the same tokens."""
    server = start_weft(*FLAGS, "--tensor-parallel-size", str(tensor))
    server.http.timeout = PATIENCE
    pid = server.process.pid
    made = server.complete(**{**LONG, "temperature": 0})
    assert made.status_code == 200, made.text
    wanted = made.json()["choices"][0]["text"]
    for victim in ("front", "head", "rank")[: 1 + tensor]:
        one, other = fronts(server)
        with stream_at(server, {one}, **LONG, temperature=0) as stream:
            stream.read(50)
            os.kill(other if victim == "front" else with_role(pid, victim)[0], signal.SIGKILL)
            retried = insistent(server)
            assert retried.json()["choices"][0]["text"] == wanted
            assert stream.read() == wanted, victim
        server.wait(lambda: len(fronts(server)) == 2, PATIENCE)
    left = list(children(pid))
    assert len(left) == 2 + tensor
    server.process.kill()
    server.process.wait()
    server.wait(lambda: not any(map(is_alive, left)), 60)


def test_a_front_that_drains_leaves_the_engines_to_the_other(tmp_path: Path) -> None:
    """The test acts as the supervisor of an engine and two API servers."""
    write_tokenizer(tmp_path)
    config = engine_config(tmp_path, {})
    folder = private_folder()
    engines = FakeEngines(str(folder), 1, [], False)
    running: list[subprocess.Popen[bytes]] = []
    links: list[socket.socket] = []
    try:
        address = engines.start("0", 1)
        assert isinstance(address.endpoint, str)
        record = process_registry.ProcessRecord(
            role="head", name="0", incarnation=1, state="running", endpoint=address.endpoint
        )
        process_registry.write(folder, process_registry.ProcessRegistry((record,)))
        with bind("127.0.0.1", 0, listens=False) as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            section = FrontSection(port=reserved.getsockname()[1])
            for name in ("0", "1"):
                ours, theirs = channel.channel()
                setup = FrontSetup(config=config, section=section, name=name, folder=str(folder))
                with theirs:
                    running.append(start_front(setup, theirs))
                links.append(ours)
            for link in links:
                assert until_ready(link)
            channel.tell(links[0], "drain")
            assert running[0].wait(PATIENCE) == 0
            assert address.process.poll() is None
            url = f"http://127.0.0.1:{section.port}/v1/completions"
            body = {"model": "fake", "prompt": "abc", "max_tokens": 400}
            answer = httpx.post(url, json=body, timeout=PATIENCE)
            assert answer.json()["choices"][0]["text"] == ("abc" * 400)[:400]
            channel.tell(links[1], "drain")
            assert running[1].wait(PATIENCE) == 0
            assert address.process.poll() is None
    finally:
        for process in running:
            process.kill()
            process.wait()
        engines.kill("0", 1)
        engines.close()
        shutil.rmtree(folder, ignore_errors=True)


def until_ready(link: socket.socket) -> bool:
    """Return True once the API server reports ready; False if the link closes or after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        heard = channel.receive(link)
        if heard is None:
            return False
        if any(isinstance(message, channel.FrontReady) for message in heard):
            return True
        time.sleep(0.05)
    return False


def test_a_port_of_another_server_is_not_shared() -> None:
    """Both would answer for each other."""
    program = "from weft.cli.main import main; main()"
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = ["serve", "--fronts", "2", "--device", "cpu", "--port", str(taken.getsockname()[1])]
        made = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert made.returncode == 2, made.stderr
    assert "--port" in made.stderr
