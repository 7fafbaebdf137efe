"""One group over two hosts: network namespaces with addresses of their own, and a cable that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.host_zero import answers
from tests.faults.rig import config_of
from weft import LLM
from weft.common import env
from weft.common.errors import ConfigError
from weft.config.group import compare, shared_settings
from weft.config.hosts import check_hosts, meeting_place, ranks_on
from weft.config.sections import ParallelSection

ROOT = Path(__file__).resolve().parents[2]
ANSWER = 200.0
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory": "8MiB",
    "rank_timeout": 8.0,
}


class Hosts:
    """Two namespaces."""

    def __init__(self) -> None:
        mark = f"{os.getpid() % 100000}"
        self.names = (f"weft{mark}a", f"weft{mark}b")
        self.addresses = ("10.213.7.1", "10.213.7.2")
        self.links = (f"wv{mark}a", f"wv{mark}b")
        self.processes: list[subprocess.Popen[str]] = []

    def up(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")

    def down(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def cable(self, state: str) -> None:
        """ "up" or "down"."""
        _ip("-n", self.names[1], "link", "set", self.links[1], state)

    def run(self, host: int, *command: str) -> subprocess.Popen[str]:
        whole = ["ip", "netns", "exec", self.names[host], sys.executable, *command]
        variables = env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        process = subprocess.Popen(
            whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT
        )
        self.processes.append(process)
        return process


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.up()
    except (OSError, subprocess.CalledProcessError) as error:
        made.down()
        pytest.skip(f"this machine makes no network namespaces: {error}")
    yield made
    made.down()


class Zero:
    """Host 0's script."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("ended")

    def line(self) -> str:
        return self._lines.get(timeout=ANSWER).strip()

    def ask(self, tokens: int = 60) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{tokens}\n")
        self.process.stdin.flush()

    def told(self) -> tuple[list[list[int]], int]:
        """(tokens, recoveries so far)."""
        tokens, _, recoveries = self.line().rpartition(" ")
        return json.loads(tokens), int(recoveries)


def child_of(process: subprocess.Popen[str]) -> int:
    """The youngest child of a host's process; waits for one."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = []
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
        if found:
            return max(found)
        time.sleep(0.05)
    raise AssertionError("it has no child")


def test_two_hosts_and_what_befalls_the_second(hosts: Hosts, tmp_path: Path) -> None:
    with LLM("spool-text", **SETTINGS) as alone:
        wanted = answers(alone)
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    parallel = {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "rdzv": f"{hosts.addresses[0]}:5799",
        "group_secret": str(secret),
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SETTINGS, **parallel}.items()]
    other = hosts.run(1, "-m", "weft", "serve", "spool-text", *flags, "--node-rank=1")
    zero = Zero(hosts.run(0, "-m", "tests.faults.host_zero", json.dumps({**SETTINGS, **parallel})))
    assert zero.line() == "ready"
    zero.ask()
    assert zero.told() == (wanted, 0)

    for number in (signal.SIGKILL, signal.SIGSTOP):
        zero.ask()
        time.sleep(0.3)
        os.kill(child_of(other), number)
        assert zero.told()[0] == wanted
    kept = child_of(other)
    hosts.cable("down")
    zero.ask()
    time.sleep(12)
    hosts.cable("up")
    assert zero.told()[0] == wanted
    assert child_of(other) == kept, "a rank that lost its head keeps its weights"
    zero.ask()
    told, recoveries = zero.told()
    assert told == wanted
    assert recoveries >= 2  # what comes between two questions is found with the next one
    assert zero.process.stdin is not None
    zero.process.stdin.close()
    assert zero.process.wait(60) == 0
    assert other.wait(60) == 0


ASK = """
import sys, httpx
messages = [{"role": "user", "content": "Tom has 12 apples"}]
body = {"model": sys.argv[2], "messages": messages, "temperature": 0, "max_tokens": 150, "ignore_eos": True}
answer = httpx.post(sys.argv[1] + "/v1/chat/completions", json=body, timeout=200)
print(answer.status_code, answer.json()["choices"][0]["message"]["content"].encode())
"""


@pytest.mark.grid
def test_ranks_of_another_host_outlive_their_head(hosts: Hosts, tmp_path: Path) -> None:
    """The head of ``weft serve`` is killed, stopped, and killed as soon as it is back."""
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    parallel = {"tensor_parallel_size": 2, "nnodes": 2, "rdzv": f"{hosts.addresses[0]}:5799"}
    given = {**SETTINGS, **parallel, "group_secret": str(secret)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    serve = ["-m", "weft", "serve", "spool-text", *flags]
    other = hosts.run(1, *serve, "--node-rank=1")
    server = Zero(hosts.run(0, *serve, "--port=0"))
    ready = server.line()
    while not ready.startswith("weft is ready"):
        ready = server.line()
    url, model = ready.split()[3], ready.split("model=")[1]

    def ask() -> Zero:
        return Zero(hosts.run(0, "-c", ASK, url, model))

    wanted, kept = ask().line(), child_of(other)
    assert wanted.startswith("200 ")
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        told = ask()
        time.sleep(1.5)
        os.kill(child_of(server.process), number)
        assert told.line() == wanted
    assert child_of(other) == kept
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert other.wait(60) == 0


def test_what_ranks_have_in_common_says_nothing_of_folders() -> None:
    """The head of a server has its files elsewhere than ranks on another host."""
    config = config_of(tensor_parallel_size=2)
    moved = msgspec.structs.replace(config, domain="/there", model_path="/here")
    compare(shared_settings(config), shared_settings(moved), "the head", "rank 1")


def test_what_hosts_need() -> None:
    good = ParallelSection(tensor_parallel_size=4, nnodes=2, rdzv="[fd00::1]:5000", group_secret="x")
    check_hosts(good)
    check_hosts(ParallelSection())
    assert meeting_place(good) == ("fd00::1", 5000)
    assert [list(ranks_on(good, node)) for node in (0, 1)] == [[0, 1], [2, 3]]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"nnodes": 2}, "--rdzv"),
        ({"nnodes": 2, "rdzv": "a:1"}, "--group-secret"),
        ({"nnodes": 2, "rdzv": "a", "group_secret": "x"}, "HOST:PORT"),
        ({"nnodes": 2, "rdzv": "a:1", "group_secret": "x"}, "--tensor-parallel-size"),
        ({"nnodes": 2, "rdzv": "a:1", "group_secret": "x", "data_parallel_size": 2}, "--data-parallel-size"),
        ({"node_rank": 1}, "--node-rank"),
    ]
    for fields, named in bad:
        with pytest.raises(ConfigError, match=named):
            check_hosts(ParallelSection(**fields))
