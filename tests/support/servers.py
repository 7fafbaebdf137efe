"""Run server processes for tests: wait until ready, and end each server with the test."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes import with_role
from tests.support.slowness import deadline
from weft.common import env

ROOT = Path(__file__).parents[2]
READY = re.compile(r"^weft is ready: (https?://\S+) models?=(\S+)$")


class Running:
    """Hold a server process and the printed URL, and end the process in several ways."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.process = process
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.url, self.model = self._ready(seconds)
        self.http = httpx.Client(base_url=self.url, timeout=deadline(30), verify=False)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            self.lines.put(line)
        self.lines.put(None)

    def _ready(self, seconds: float) -> tuple[str, str]:
        until = time.monotonic() + deadline(seconds)
        while True:
            line = self.lines.get(timeout=max(0.1, until - time.monotonic()))
            if line is None:
                raise AssertionError(f"the server ended: {''.join(self.output)[-2000:]}")
            if found := READY.match(line.strip()):
                return found[1], found[2]

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, **fields}
        return self.http.post("/v1/completions", json=body)

    @contextlib.contextmanager
    def stream(self, route: str = "/v1/chat/completions", **fields: Any) -> Iterator[httpx.Response]:
        body: dict[str, Any] = {"model": self.model, "stream": True, **fields}
        if "chat" in route:
            body.setdefault("messages", [{"role": "user", "content": "hello"}])
        with (
            httpx.Client(base_url=self.url, timeout=self.http.timeout, verify=False) as client,
            client.stream("POST", route, json=body) as r,
        ):
            yield r

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.http.get("/metrics").text
        found = re.findall(rf"^weft:{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def wait(self, condition: Callable[[], bool], seconds: float = 5.0) -> float:
        """Wait until ``condition`` and return the seconds. Fail after ``seconds``, scaled to this machine's
        speed.

        The polling interval grows: a page of metrics costs the server milliseconds.
        """
        start, seconds = time.monotonic(), deadline(seconds)
        while not condition():
            waited = time.monotonic() - start
            assert waited < seconds, "did not happen in time"
            time.sleep(min(0.2, max(0.02, waited / 10)))
        return time.monotonic() - start

    def engine(self) -> int:
        """Return the process id of the engine."""
        return with_role(self.process.pid, "head")[-1]  # the youngest: a dead one may still be listed

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20.0) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(deadline(seconds))

    def close(self) -> None:
        self.http.close()
        for end in (self.process.terminate, self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                end()  # after the second signal the server no longer waits for its streams
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(deadline(3))


def events(source: httpx.Response | Iterator[str]) -> list[Any]:
    """Return the parsed events of a stream or of its lines; ``[DONE]`` stays a string."""
    found = []
    for line in source.iter_lines() if isinstance(source, httpx.Response) else source:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


class Servers:
    """The server processes of a session."""

    def __init__(self) -> None:
        self._running: list[Running] = []

    def start(self, command: list[str], seconds: float, **environment: str) -> Running:
        """Start a server and wait until it is ready."""
        wanted = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        variables = env.child_environment(**wanted)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        try:
            self._running.append(Running(process, seconds))
        except BaseException:
            process.kill()
            raise
        return self._running[-1]

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """End the servers that were started inside the context."""
        before = len(self._running)
        yield
        while len(self._running) > before:
            self._running.pop().close()

    def weft(self, *arguments: str, seconds: float = 120.0, **environment: str) -> Running:
        """Starts ``weft serve --port 0`` with ``arguments``."""
        program = "from weft.cli.main import main; main()"
        command = [sys.executable, "-c", program, "serve", "--port", "0", *arguments]
        return self.start(command, seconds, HF_HUB_OFFLINE="1", **environment)

    def scripted(self, folder: Path, entries: Sequence[dict[str, Any]], *arguments: str) -> Running:
        """Starts ``weft serve --scripted`` with a script of ``entries``, which is written to ``folder``."""
        script = folder / f"script-{len(list(folder.iterdir()))}.jsonl"
        script.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return self.weft("--scripted", str(script), *arguments)
