"""``weft serve`` as a process: it starts, answers, stops in order, and never outlives its head."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest


class Server:
    """A running ``weft serve`` whose ready line was read."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        # Sockets have short paths, and pytest's folders are long.
        self.temporary = tempfile.mkdtemp(prefix="w")
        environment = {**os.environ, "TMPDIR": self.temporary, "OMP_NUM_THREADS": "1"}
        self.log = folder / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft", "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )

    def url(self) -> str:
        """Waits for the ready line and returns the address it names."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                return found[0]
        raise AssertionError(f"no ready line:\n{self.log.read_text()}")

    def head(self) -> int:
        """The process id of the head."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            if b"weft.launch.head_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("no head")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.temporary)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def starter(*arguments: str) -> Server:
        servers.append(Server(tmp_path, *arguments))
        return servers[-1]

    yield starter
    for server in servers:
        server.close()


def test_it_serves_and_ends_with_nothing_left_behind(checkpoint: str, start: Any, tmp_path: Path) -> None:
    config = tmp_path / "weft.yaml"
    config.write_text("served-model-name: tiny\nmax-num-seqs: 4\n")
    server = start(checkpoint, "--config", str(config), "--port", "0", "--block-size", "16")
    base = server.url()
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "tiny"
    head = server.head()
    assert os.listdir(server.temporary), "the endpoint lies in the folder"

    report = tmp_path / "report.json"
    command = ["eval", "gsm-mini", "--url", base, "--limit", "5", "--max-tokens", "4", "--json", str(report)]
    made = subprocess.run(
        [sys.executable, "-m", "weft", *command], capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    assert re.fullmatch(r"gsm-mini: \d+ / 5 exact \(\d+\.\d%\), [\d.]+ s\n", made.stdout)
    found = json.loads(report.read_text())
    assert (found["target"], found["total"], len(found["problems"])) == ("tiny", 5, 5)

    wrong = subprocess.run(
        [sys.executable, "-m", "weft", "eval", "gsm-mini", "other", "--url", base, "--limit", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert wrong.returncode == 2
    assert "404" in wrong.stderr
    assert "Traceback" not in wrong.stderr

    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log.read_text()
    assert not Path(f"/proc/{head}").exists()
    assert os.listdir(server.temporary) == []


def test_it_fails_when_its_head_dies_and_must_not_be_started_again(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0", "--engine-restarts", "0")
    server.url()
    os.kill(server.head(), signal.SIGKILL)
    assert server.process.wait(60) == 1
    assert os.listdir(server.temporary) == []


def test_a_head_dies_with_its_parent(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0")
    server.url()
    head = server.head()
    pidfd = os.pidfd_open(head)
    server.process.kill()
    import select

    assert select.select([pidfd], [], [], 20)[0], "the head outlived its parent"
    os.close(pidfd)


def test_the_next_start_removes_the_folder_of_a_killed_server(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0")
    server.url()
    (left,) = Path(server.temporary).iterdir()
    server.process.kill()
    server.process.wait()
    assert left.is_dir()
    again = subprocess.run(
        [sys.executable, "-m", "weft", "serve", checkpoint, "--attention-backend", "no-such-backend"],
        env={**os.environ, "TMPDIR": server.temporary, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert again.returncode == 2, again.stderr
    assert os.listdir(server.temporary) == []


def test_a_configuration_that_only_the_head_can_refuse_gives_status_2(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0", "--attention-backend", "no-such-backend")
    assert server.process.wait(60) == 2
    log = server.log.read_text()
    assert "weft: no attention backend called 'no-such-backend'" in log
    assert "Traceback" not in log
    assert os.listdir(server.temporary) == []


def test_an_address_in_use_gives_status_2_and_leaves_no_head(checkpoint: str, start: Any) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start(checkpoint, "--port", str(taken.getsockname()[1]))
        assert server.process.wait(60) == 2
    assert "--port" in server.log.read_text()
    assert os.listdir(server.temporary) == []


def test_sigterm_while_loading_ends_in_order(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0")
    import time

    deadline = time.monotonic() + 60
    while not os.listdir(server.temporary):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) in (0, 143)
    assert os.listdir(server.temporary) == []
