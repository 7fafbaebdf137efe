"""Processes of two releases in one fleet, and an address that leads to another engine."""

from __future__ import annotations

import json
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.cli.test_engine_front import TOPOLOGY, Fleet, alive, fleet, get
from tests.cli.test_scale import groups, load, stream
from tests.cli.test_up import ask
from tests.support.secret import write_secret
from tests.support.slowness import until
from weft.control.directory.host_server import new_incarnation
from weft.control.directory.record import EngineRecord
from weft.types.messages import VERSION

__all__ = ["fleet"]

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "releases" / "version1.json"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the code of the earlier release."""
    commit = json.loads(RECORDING.read_text())["commit"]
    folder = tmp_path_factory.mktemp("earlier")
    archive = folder / "weft.tar"
    command = ["git", "-C", str(ROOT), "archive", "--output", str(archive), commit, "weft", "pyproject.toml"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no git here")
    if ran.returncode:
        pytest.skip(f"the history of this checkout has no commit {commit[:8]}: {ran.stderr.strip()}")
    with tarfile.open(archive) as found:
        found.extractall(folder, filter="data")
    return folder


def engine_releases(fleet: Fleet) -> dict[str, int]:
    """Return engine -> newest version of the messages, as the records say."""
    return {name: record.messages for name, record in fleet.directory.read().items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_and_api_servers_of_two_releases_serve_together(fleet: Fleet, earlier: Path) -> None:
    """Caches move from an engine of this release to an engine of the earlier one, and the other way round."""
    fleet.engine("prefill0")
    fleet.engine("decode0", code=earlier)
    today, before = fleet.run("front"), fleet.run("front", code=earlier)
    due = ask(now := today.url())
    assert ask(then := before.url()) == due
    assert engine_releases(fleet) == {"prefill0": VERSION, "decode0": 1}
    long_due = stream(now)
    assert "".join(streamed(now)) == "".join(streamed(then))
    assert stream(then) == long_due
    for server in (today, before):
        assert "is lost" not in server.log.read_text()
    # The upgrade goes on: the other engine of each role has the other release.
    fleet.engine("prefill1", code=earlier)
    fleet.engine("decode1")
    until(lambda: alive(now, "prefill1") and alive(now, "decode1"), 90)
    assert engine_releases(fleet)["decode1"] == VERSION
    assert {ask(base) for base in (now, then) for _ in range(4)} == {due}


def streamed(base: str) -> Iterator[str]:
    """Yield the texts of the chunks of a streamed answer."""
    body = {"model": "spool-text", "prompt": "One", "max_tokens": 12, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_address_that_another_engine_took_over_is_not_used(fleet: Fleet) -> None:
    """The record of a lost host names a port at which another engine listens now."""
    fleet.file.write_text(TOPOLOGY + f"group-secret: {write_secret(fleet.folder)}\n")
    front = fleet.run("front")
    for group in ("prefill0", "decode0"):
        fleet.engine(group, "--advertise", "127.0.0.1")
    base = front.url()
    due, long_due = ask(base), stream(base)
    found = fleet.directory.read()["decode0"]
    lost = msgspec.structs.replace(found, name="decode5", group="decode5", incarnation=new_incarnation())
    with ThreadPoolExecutor(1) as pool, renewed(fleet, lost):
        long = pool.submit(stream, base)
        until(lambda: load(base, "decode0") > 0)
        until(lambda: "another engine answers at the address: engine decode0" in front.log.read_text(), 60)
        assert long.result() == long_due  # the connection to decode0 under its own name goes on
        assert groups(base).keys() == {"prefill0", "decode0", "decode5"}
        assert not alive(base, "decode5")
        assert get(f"{base}/health")[1]["status"] == "degraded"
        assert ask(base) == due
    until(lambda: "decode5" not in groups(base), 30)
    assert get(f"{base}/health")[1]["status"] == "alive"
    assert "engine decode0 is lost" not in front.log.read_text()


class renewed:
    """Renew a record, as the host of an engine does, until the end of the block. Then withdraw the record."""

    def __init__(self, fleet: Fleet, record: EngineRecord) -> None:
        self._fleet, self._record = fleet, record
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew)

    def __enter__(self) -> None:
        self._thread.start()

    def _renew(self) -> None:
        beat = self._record.beat
        while not self._over.wait(1.0):
            beat += 1
            self._fleet.directory.publish(msgspec.structs.replace(self._record, beat=beat))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._fleet.directory.withdraw(self._record)
