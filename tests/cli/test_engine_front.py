"""Groups and API servers that run alone: ``weft engine`` and ``weft front``, over a folder as directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_scale import ADMIN, Streams, groups, load, stream, weft
from tests.cli.test_serve import Server
from tests.cli.test_up import Clients, ask
from tests.support.processes import is_alive
from tests.support.secret import write_secret
from tests.support.slowness import deadline, until
from weft.control.directory.folder import FolderDirectory

TOPOLOGY = """
model: spool-text
threads: 1
front: {port: 0, admin-key: [secret]}
groups:
  - {role: prefill}
  - {role: decode}
"""


class Fleet:
    """Processes over one topology file and one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "topology.yaml"
        self.file.write_text(TOPOLOGY)
        self.file.chmod(0o600)
        self.directory = FolderDirectory(folder / "directory")
        self.started: list[Server] = []

    def run(self, command: str, *arguments: str, code: Path | None = None, **environment: str) -> Server:
        place = self.folder / f"process{len(self.started)}"
        place.mkdir()
        directory = str(self.folder / "directory")
        made = Server(
            place,
            str(self.file),
            "--directory",
            directory,
            *arguments,
            command=command,
            code=code,
            **environment,
        )
        self.started.append(made)
        return made

    def engine(self, group: str, *arguments: str, code: Path | None = None, **environment: str) -> Server:
        return self.run("engine", "--group", group, *arguments, code=code, **environment)

    def incarnation(self, name: str) -> int:
        """Return the number of the engine's present process; 0 if the directory has no engine of the name."""
        record = self.directory.read().get(name)
        return 0 if record is None else record.incarnation

    def close(self) -> None:
        for one in self.started:
            one.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    try:
        yield made
    finally:
        made.close()


def port_of(fleet: Fleet, name: str) -> str:
    """Return the URL of the HTTP port of the group with engine ``name``."""
    until(lambda: bool(fleet.incarnation(name)))
    return f"http://{fleet.directory.read()[name].port}"


def get(url: str) -> tuple[int, Any]:
    answer = httpx.get(url, timeout=deadline(30))
    return answer.status_code, answer.json()


@pytest.mark.slow
def test_engines_outlive_api_servers_and_leave_and_join_without_a_lost_request(fleet: Fleet) -> None:
    front = fleet.run("front")  # before any engine
    prefill, decode = fleet.engine("prefill0"), fleet.engine("decode0", "--port", "0", WEFT_ADMIN_KEY="k")
    base = front.url()
    due = ask(base)
    port = port_of(fleet, "decode0")
    assert get(f"{port}/live") == (200, {"status": "alive"})
    # The command's own look at the engine may come after the API server's.
    until(lambda: get(f"{port}/ready") == (200, {"status": "serving", "engines": {"decode0": True}}))
    assert 'weft:engine_up{head="decode0"' in httpx.get(f"{port}/metrics").text
    assert httpx.post(f"{port}/drain").status_code == 401

    second = fleet.run("front")
    other = second.url()
    assert ask(other) == due
    heads = {one: one.engine() for one in (prefill, decode)}
    with Clients(other) as clients, Streams(other, 4) as streams:
        front.process.kill()  # the engines and the other API server live on
        fleet.engine("decode5")  # joins under a number that the file does not list
        until(lambda: groups(other).get("decode5") == "running")
        weft(other, "drain", "decode0")
        until(lambda: decode.process.poll() == 0)
        until(lambda: list(groups(other)) == ["decode5", "prefill0"])
    assert len(set(streams.texts)) == 1
    assert clients.errors == []
    assert set(clients.texts) == {due}
    assert is_alive(heads[prefill])
    assert not is_alive(heads[decode])

    adopted = fleet.run("front").url()  # finds the engines, which load nothing again
    assert ask(adopted) == due
    assert prefill.engine() == heads[prefill]
    assert "start" in weft(adopted, "scale", "decode", "3", status=2)
    assert "without a prefill group" in weft(adopted, "drain", "prefill0", status=2)


@pytest.mark.slow
def test_requests_wait_for_an_engine_that_is_started_again(fleet: Fleet) -> None:
    front = fleet.run("front")
    fleet.engine("prefill0")
    decode = fleet.engine("decode0")
    base = front.url()
    due, long_due = ask(base), stream(base)
    first = fleet.incarnation("decode0")
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(stream, base)
        until(lambda: load(base, "decode0") > 0)
        os.kill(decode.engine(), signal.SIGKILL)
        assert decode.process.wait(deadline(30)) == 1
        until(lambda: fleet.incarnation("decode0") == 0)
        fleet.engine("decode0")
        assert long.result(deadline(120)) == long_due
    assert fleet.incarnation("decode0") not in (0, first)
    assert ask(base) == due
    status, said = get(f"{base}/health")
    assert (status, said["status"]) == (200, "alive")


@pytest.mark.slow
def test_api_servers_that_run_alone_share_the_pause(fleet: Fleet) -> None:
    """Also an API server that starts during the pause, and an engine that starts again."""
    fleet.engine("prefill0")
    decode = fleet.engine("decode0")
    bases = [fleet.run("front").url(), fleet.run("front").url()]

    def post(base: str, route: str) -> None:
        answer = httpx.post(f"{base}{route}", headers=ADMIN, timeout=deadline(120))
        assert answer.status_code == 200, answer.text

    def paused() -> set[bool]:
        answers = [httpx.get(f"{base}/is_paused", headers=ADMIN, timeout=deadline(30)) for base in bases]
        return {answer.json()["is_paused"] for answer in answers}

    due = stream(bases[0])
    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(stream, base) for base in bases]
        until(lambda: load(bases[0], "decode0") == 2)
        post(bases[0], "/pause?mode=keep")
        assert load(bases[0], "decode0") == 0  # the answer comes when the other API server holds its requests
        assert paused() == {True}
        first = fleet.incarnation("decode0")
        os.kill(decode.engine(), signal.SIGKILL)
        until(lambda: fleet.incarnation("decode0") == 0)
        fleet.engine("decode0")
        until(lambda: fleet.incarnation("decode0") not in (0, first))
        bases.append(fleet.run("front").url())
        assert paused() == {True}
        short = pool.submit(ask, bases[1])
        time.sleep(0.5)
        assert not short.done()
        post(bases[2], "/resume")
        assert [one.result(deadline(120)) for one in long] == [due] * 2
        assert short.result(deadline(120)) == ask(bases[2])
    until(lambda: paused() == {False})
    post(bases[1], "/pause")  # the former API servers end no request of a later one
    post(bases[1], "/resume")


@pytest.mark.slow
def test_a_killed_host_is_forgotten_when_its_lease_ends(fleet: Fleet) -> None:
    """SIGKILL of ``weft engine`` withdraws nothing: the record stays, and expires."""
    front = fleet.run("front")
    fleet.engine("prefill0")
    decode = fleet.engine("decode0")
    base = front.url()
    due = ask(base)
    fleet.engine("decode1")
    until(lambda: groups(base).get("decode1") == "running")
    engine = decode.engine()
    decode.process.kill()
    until(lambda: not is_alive(engine))
    assert ask(base) == due
    assert fleet.incarnation("decode0")
    until(lambda: get(f"{base}/health")[1]["status"] == "degraded")
    until(lambda: "decode0" not in groups(base), 30)
    until(lambda: get(f"{base}/health")[1]["status"] == "alive")
    assert ask(base) == due


@pytest.mark.slow
def test_groups_with_addresses_for_other_hosts(fleet: Fleet) -> None:
    """Engines listen on TCP with keys, and caches move over TCP, as between two hosts."""
    secret = write_secret(fleet.folder)
    fleet.file.write_text(TOPOLOGY + f"group-secret: {secret}\n")
    front = fleet.run("front")
    for group in ("prefill0", "decode0"):
        fleet.engine(group, "--advertise", "127.0.0.1")
    base = front.url()
    due = ask(base)
    assert {one.endpoint[:16] for one in fleet.directory.read().values()} == {"tcp://127.0.0.1:"}
    assert get(f"{base}/admin/groups")[0] == 401
    assert httpx.get(f"{base}/admin/groups", headers=ADMIN).status_code == 200
    front.process.terminate()
    assert front.process.wait(deadline(30)) == 0
    assert ask(fleet.run("front").url()) == due


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("engine", "--group", "decod0"), "Did you mean decode0"),
        (("engine", "--group", "encode0"), "the file has the groups prefill0, decode0"),
        (("engine", "--group", "decode0", "--advertise", "127.0.0.1"), "--group-secret"),
        (("front", "--fronts", "2"), "start several `weft front`"),
        (("front", "--directory", "etcd:x"), "unknown kind of directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_wrong_settings_are_refused_before_anything_starts(
    fleet: Fleet, arguments: tuple[str, ...], says: str
) -> None:
    command, *rest = arguments
    place = ["--directory", str(fleet.folder / "directory")]
    words = [sys.executable, "-m", "weft", command, str(fleet.file), *place, *rest]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=deadline(60))
    assert ran.returncode == 2
    assert says.lower() in ran.stderr.lower()
    assert "Traceback" not in ran.stderr


def test_a_directory_is_required(fleet: Fleet) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WEFT_DIRECTORY"}
    words = [sys.executable, "-m", "weft", "front", str(fleet.file)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=deadline(60), env=environment)
    assert ran.returncode == 2
    assert "--directory" in ran.stderr


@pytest.mark.slow
def test_an_engine_that_was_given_up_and_lives_is_used_again(fleet: Fleet) -> None:
    """The API server gives a silent engine up. Nobody restarts the engine, which goes on later."""
    front = fleet.run("front", "--engine-timeout", "3")
    fleet.engine("prefill0")
    decode = fleet.engine("decode0")
    base = front.url()
    due = ask(base)
    first, engine = fleet.incarnation("decode0"), decode.engine()
    os.kill(engine, signal.SIGSTOP)
    until(lambda: not alive(base, "decode0"), 30)
    time.sleep(3)  # further connections fail, too
    os.kill(engine, signal.SIGCONT)
    until(lambda: alive(base, "decode0"), 90)
    assert ask(base) == due
    assert (fleet.incarnation("decode0"), decode.engine()) == (first, engine)


@pytest.mark.slow
def test_a_hung_engine_ends_its_group(fleet: Fleet) -> None:
    fleet.file.write_text(TOPOLOGY.replace("port: 0", "port: 0, engine-timeout: 3"))
    decode = fleet.engine("decode0", "--port", "0")
    port = port_of(fleet, "decode0")
    until(lambda: get(f"{port}/ready")[0] == 200)
    os.kill(decode.engine(), signal.SIGSTOP)
    assert decode.process.wait(deadline(30)) == 1
    assert "has made no progress for 3 seconds" in decode.log.read_text()


def test_two_groups_with_one_name_are_refused(fleet: Fleet) -> None:
    fleet.engine("decode0")
    until(lambda: bool(fleet.incarnation("decode0")))
    twice = fleet.engine("decode0")
    assert twice.process.wait(deadline(60)) == 2
    assert "'decode0' lives already in this directory" in twice.log.read_text()


def alive(base: str, name: str) -> bool:
    """Return True if the API server has the engine for alive."""
    answer = httpx.get(f"{base}/admin/groups", headers=ADMIN, timeout=deadline(30)).json()
    return any(one["alive"] for one in answer["engines"] if one["name"] == name)
