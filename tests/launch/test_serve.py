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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft.common.cores import usable_cores


class Server:
    """A running ``weft serve`` whose ready line was read."""

    def __init__(self, folder: Path, *arguments: str, omp_threads: str | None = "1") -> None:
        # Sockets have short paths, and pytest's folders are long.
        self.temporary = tempfile.mkdtemp(prefix="w")
        environment = {**os.environ, "TMPDIR": self.temporary}
        environment.pop("OMP_NUM_THREADS", None)
        if omp_threads is not None:
            environment["OMP_NUM_THREADS"] = omp_threads
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

    def starter(*arguments: str, **more: Any) -> Server:
        servers.append(Server(tmp_path, *arguments, **more))
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


@pytest.mark.parametrize(
    ("tensor", "names"),
    [(1, ["head 0", "head 1"]), (2, ["head 0", "head 0 rank 1", "head 1", "head 1 rank 3"])],
)
def test_ranks_of_replicas_share_the_cores_and_each_has_a_name_and_a_trace(
    tensor: int, names: list[str], checkpoint: str, start: Any, tmp_path: Path
) -> None:
    layout = ("--data-parallel-size", "2", "--tensor-parallel-size", str(tensor))
    options = ("--port", "0", "--rank-timeout", "60", "--trace", str(tmp_path / "t.json"))
    server = start(checkpoint, *layout, *options, omp_threads=None)
    base = server.url()
    body = {"model": checkpoint, "max_tokens": 4, "ignore_eos": True}
    prompts = [f"{number} " * 200 for number in range(8)]  # without a common prefix: spread over both
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(httpx.post, f"{base}/v1/completions", json={**body, "prompt": prompt}, timeout=60)
            for prompt in prompts
        ]
        assert {made.result().status_code for made in asked} == {200}
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log.read_text()
    log = server.log.read_text()
    spoken = re.findall(r"\d\d:\d\d:\d\d \w (.+?) weft\.\S+: (.*)$", log, re.MULTILINE)
    threads = max(1, usable_cores() // len(names))
    said = sorted((name, text.partition(" (")[0]) for name, text in spoken if text.startswith("CPU threads"))
    assert said == [(name, f"CPU threads: {threads}") for name in names], log
    assert {name for name, _ in spoken} <= {"front", *names}
    files = ["t.json", *(f"t.rank{rank}.json" for rank in range(1, len(names)))]
    assert sorted(path.name for path in tmp_path.glob("t*.json*")) == sorted(files)
    traces = [json.loads((tmp_path / file).read_text()) for file in files]
    assert all(any(event.get("cat") == "step" for event in trace) for trace in traces)


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
