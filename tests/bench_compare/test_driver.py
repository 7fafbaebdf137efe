"""Driver processes with a fake engine: answers, errors, crashes, deadlines, turns and the end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.driver import Driver, PeerError, pinned
from bench.peers.protocol import tree
from tests.support.slowness import deadline

PEERS = Path(__file__).parents[2] / "bench" / "peers"

FAKE = """
import subprocess, sys, time
sys.path.insert(0, {peers!r})
import protocol

class Fake:
    def load(self, options):
        print("a library prints this")
        self.child = subprocess.Popen(["sleep", "60"])
        return "1.0"

    def run(self, prompts, output_tokens):
        if prompts[0][0] == 1:
            raise RuntimeError("cannot")
        if prompts[0][0] == 2:
            print("last words", file=sys.stderr, flush=True)
            sys.exit(3)
        if prompts[0][0] == 3:
            time.sleep(30)
        if prompts[0][0] == 4:
            return [[7]]
        return [[sum(prompt)] * output_tokens for prompt in prompts]

    def close(self):
        self.child.kill()

protocol.serve(Fake())
"""


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def reaches(pid: int, states: str) -> bool:
    until = time.monotonic() + deadline(10)
    while state(pid) not in states.split() and time.monotonic() < until:
        time.sleep(0.02)
    return state(pid) in states.split()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(peers=str(PEERS)))
    made = Driver([sys.executable, str(script)], {}, tmp_path / "log")
    yield made
    made.close()


def run(driver: Driver, first: int, tokens: int = 2, deadline: float = 30) -> dict[str, object]:
    return driver.ask({"run": "x", "prompts": [[first, 10]], "output_tokens": tokens}, deadline)


def test_load_run_memory_stop(driver: Driver) -> None:
    loaded = driver.ask({"load": {}}, 30)
    assert loaded["version"] == "1.0"
    assert loaded["ready_s"] > 0
    assert run(driver, 0)["tokens"] == [[10, 10]]
    assert driver.ask({"memory": True}, 30)["peak_rss"] > 1 << 20
    assert driver.ask({"stop": True}, 30) == {"stopped": True}


def test_the_driver_continues_after_an_error(driver: Driver) -> None:
    with pytest.raises(PeerError, match="RuntimeError: cannot"):
        run(driver, 1)
    assert run(driver, 0)["output_tokens"] == 2


def test_a_wrong_number_of_tokens_is_an_error(driver: Driver) -> None:
    with pytest.raises(PeerError, match="wrong lengths"):
        run(driver, 4)


def test_a_crash_shows_the_last_lines(driver: Driver) -> None:
    with pytest.raises(PeerError, match=r"status 3\n(.*\n)*last words"):
        run(driver, 2)
    with pytest.raises(PeerError, match="ended"):
        run(driver, 0)


def test_a_deadline_ends_the_wait(driver: Driver) -> None:
    driver.ask({"load": {}}, 30)
    with pytest.raises(PeerError, match="no answer within"):
        run(driver, 3, deadline=0.2)


def test_a_turn_stops_the_tree_after_it_and_close_ends_it(driver: Driver) -> None:
    with driver.turn():
        driver.ask({"load": {}}, 30)
    pids = tree(driver.process.pid)
    assert len(pids) == 2
    assert all(reaches(pid, "T") for pid in pids)
    with driver.turn():
        assert run(driver, 0)["output_tokens"] == 2
    driver.close()
    assert all(reaches(pid, "Z gone") for pid in pids)


def test_pinning_needs_more_cpus_than_threads() -> None:
    assert pinned(["x"], 10_000) == ["x"]


def test_a_stopped_driver_dies_with_the_comparison(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from bench.driver import Driver\n"
        f"made = Driver(['sleep', '60'], {{}}, Path({str(tmp_path / 'log')!r}))\n"
        "with made.turn():\n"
        "    print(made.process.pid, flush=True)\n"
        "os._exit(9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PEERS.parents[1],
        capture_output=True,
        text=True,
        timeout=deadline(60),
    )
    assert reaches(int(done.stdout), "Z gone")
