"""Groups that join, leave and restart while a server answers: ``weft scale``, ``drain``, ``restart``."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tests.cli.test_serve import Server, start
from tests.cli.test_up import PROMPT, Clients, ask, engines, until
from tests.support.processes import is_alive
from tests.support.slowness import deadline

__all__ = ["start"]

TOPOLOGY = """
model: spool-text
front: {port: 0, admin-key: [secret]}
groups:
  - {role: prefill}
  - {role: decode}
"""
ADMIN = {"Authorization": "Bearer secret"}


def weft(server_url: str, *arguments: str, status: int = 0) -> str:
    """Run a ``weft`` command for the operator, and return its output."""
    command = [sys.executable, "-m", "weft", *arguments, "--url", server_url, "--admin-key", "secret"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60))
    assert ran.returncode == status, ran.stderr
    return ran.stdout + ran.stderr


def groups(base: str) -> dict[str, str]:
    """Return name -> state of all engines."""
    answer = httpx.get(f"{base}/admin/groups", headers=ADMIN, timeout=deadline(30)).json()
    return {engine["name"]: engine["state"] for engine in answer["engines"]}


def stream(base: str) -> str:
    """Return the text of a long answer."""
    body = {"model": "spool-text", "prompt": PROMPT, "max_tokens": 1200, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{base}/v1/completions", json=body, timeout=deadline(120))
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("fronts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_request_is_lost_while_groups_join_and_leave(start: Any, tmp_path: Path, fronts: int) -> None:
    """Decode groups go from one to three and back to one under requests. No answer fails or changes."""
    file = tmp_path / "topology.yaml"
    file.write_text(TOPOLOGY.replace("port: 0", f"port: 0, fronts: {fronts}"))
    file.chmod(0o600)
    server: Server = start(str(file), command="up")
    base = server.url()
    due, long_due = ask(base), stream(base)
    with Clients(base) as clients, Streams(base, 6) as streams:
        assert "starting decode1, decode2" in weft(base, "scale", "decode", "3", "--wait", "60")
        until(server, lambda: groups(base) == dict.fromkeys(("prefill0", *decodes(3)), "running"))
        until(server, lambda: all(load(base, name) for name in decodes(3)))  # work on all of them
        before = engines(server)
        assert "draining decode1, decode2" in weft(base, "scale", "decode", "1")
        until(server, lambda: list(groups(base)) == ["prefill0", "decode0"])
        until(server, lambda: sum(map(is_alive, before)) == 2)
        until(server, lambda: len(clients.texts) > 10)
    assert len(streams.texts) >= 6
    assert set(streams.texts) == {long_due}
    assert clients.errors == []
    assert set(clients.texts) == {due}
    assert httpx.get(f"{base}/health", timeout=deadline(30)).json() == {"status": "alive"}
    assert "without a prefill group" in weft(base, "drain", "prefill0", status=2)
    assert "the names are prefill, decode" in weft(base, "scale", "encode", "1", status=2)
    old = incarnations(base)
    assert "restarting decode0" in weft(base, "restart", "decode0")
    until(server, lambda: incarnations(base)["decode0"] not in ("", old["decode0"]))
    assert incarnations(base)["prefill0"] == old["prefill0"]
    assert ask(base) == due
    server.process.terminate()
    assert server.process.wait(deadline(60)) == 0


class Streams:
    """Threads that ask for long answers, one after the other, until the end of the context."""

    def __init__(self, base: str, count: int) -> None:
        self.texts: list[str] = []
        """After the context: the texts of all answers, at least one for each thread."""
        self._base, self._count = base, count
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        self._running = [self._pool.submit(self._run) for _ in range(self._count)]
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._pool.shutdown(wait=failed is None, cancel_futures=True)
        if failed is None:
            self.texts = [text for one in self._running for text in one.result(deadline(120))]

    def _run(self) -> list[str]:
        texts = [stream(self._base)]
        while not self._over.is_set():
            texts.append(stream(self._base))
        return texts


def incarnations(base: str) -> dict[str, str]:
    """Return name -> number of the process start of all engines."""
    answer = httpx.get(f"{base}/admin/groups", headers=ADMIN, timeout=deadline(30)).json()
    return {engine["name"]: engine["incarnation"] for engine in answer["engines"]}


def decodes(count: int) -> list[str]:
    return [f"decode{number}" for number in range(count)]


def load(base: str, name: str) -> int:
    """Return the number of sequences at one engine."""
    answer = httpx.get(f"{base}/admin/groups", headers=ADMIN, timeout=deadline(30)).json()
    return sum(one["running"] or 0 for one in answer["engines"] if one["name"] == name)
