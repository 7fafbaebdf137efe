"""A server as a tree of processes: time until ready, memory, and the end.

Works with any engine that implements the OpenAI API. Linux only: the tree is read from /proc.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import httpx

from weft.bench.process_memory import Peak, ProcessMemory, sample, tree
from weft.common import env
from weft.common.errors import ConfigError, WeftError

_POLL_SECONDS = 0.2
_KILL_SECONDS = 10.0
_LOG_TAIL = 2000


class ServerFailed(WeftError):
    """The server ended, or did not answer in time. The message ends with the last part of the server's
    log."""

    code = "server_failed"


_TITLE = re.compile(r"weft: (?:(head|front) [\w.-]+|worker (\d+) of head [\w.-]+)")


def role_of(words: Sequence[str]) -> str | None:
    """Return ``head``, ``front`` or ``rank 3`` for the command line of a process of a Weft server; else None.

    Works with and without a process title.
    """
    if found := _TITLE.match(words[0]):
        return f"rank {found[2]}" if found[2] else found[1]
    if len(words) < 6:  # not yet begun, or already ended
        return None
    module = words[2]
    if module.endswith("rank_main"):
        return f"rank {words[5]}"
    return {"weft.cli.processes.engine_main": "head", "weft.cli.processes.front_main": "front"}.get(module)


def free_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class ServerProcess:
    """One server command, and all processes that the command starts.

    Use as a context manager, or call ``stop``. When this process dies in any way, the server is killed.
    ``command`` and ``url`` may contain ``{port}``, which is replaced by a free port.

    >>> with ServerProcess(["weft", "serve", "spool-text", "--port", "{port}"]) as server:
    ...     seconds = server.wait_ready(120)
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str = "http://127.0.0.1:{port}",
        *,
        model: str | None = None,
        environment: Mapping[str, str | None] | None = None,
        log_file: str | Path | None = None,
        port: int | None = None,
        prompt: str | list[int] = "a b",
    ) -> None:
        """Describe the server without starting it.

        ``model`` is the name in requests; None asks /v1/models. ``environment`` is added to the environment
        of this process; None as a value removes a variable. ``log_file`` receives standard output and error;
        without a file both are dropped. ``port`` None chooses a free port. ``prompt`` is the prompt of the
        first generation.
        """
        self.port = port or free_port()
        self.command = [part.replace("{port}", str(self.port)) for part in command]
        self.url = url.replace("{port}", str(self.port)).rstrip("/").removesuffix("/v1")
        self.model = model
        self.ready_seconds: float | None = None
        self._environment = dict(environment or {})
        self._log_path = Path(log_file) if log_file is not None else None
        self._prompt = prompt
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._peak = Peak()
        self._seen: dict[int, ProcessMemory] = {}
        self._ending = threading.Event()
        self._poller: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the command, also the id of its process group; None before ``start``."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Spawn the command in a session of its own, and measure memory in a thread.

        Raise ConfigError if the command can't be run, RuntimeError for a second start.
        """
        if self._process is not None:
            raise RuntimeError("this server was started before")
        log: BinaryIO | int = subprocess.DEVNULL
        with contextlib.ExitStack() as files:
            if self._log_path is not None:
                log = files.enter_context(self._log_path.open("wb"))
            self._started = time.monotonic()
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env.child_environment(**self._environment),
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"can't run {self.command[0]!r}: {error.strerror}") from error
        self._reaper = reaper(self._process.pid)
        self._poller = threading.Thread(target=self._poll, name="memory", daemon=True)
        self._poller.start()

    def wait_ready(self, deadline: float, key: str = "") -> float:
        """Return the seconds from the spawn to the end of the first successful generation over HTTP.

        Blocks and polls; sets ``model`` and ``ready_seconds``. ``key`` is the API key. Raise ServerFailed
        ``deadline`` seconds after the spawn, or when the server ends.
        """
        until = self._started + deadline
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(trust_env=False, timeout=5.0, headers=headers) as client:
            while time.monotonic() < until:
                process = self._process
                if process is None or process.poll() is not None:
                    status = "was stopped" if process is None else f"ended with status {process.returncode}"
                    raise ServerFailed(f"the server {status} before it answered{self._log_tail()}")
                try:
                    self._generate(client, until)
                # Until ready, refused connections and error answers are normal: try again.
                except (httpx.HTTPError, ValueError, LookupError, TypeError):
                    time.sleep(0.05)
                    continue
                self.ready_seconds = time.monotonic() - self._started
                return self.ready_seconds
        raise ServerFailed(f"the server did not answer within {deadline:g} s{self._log_tail()}")

    def _generate(self, client: httpx.Client, until: float) -> None:
        """Raise unless the server generates a token now. Sets ``model`` if unknown."""
        if self.model is None:
            found = client.get(f"{self.url}/v1/models").raise_for_status().json()
            self.model = str(found["data"][0]["id"])
        body: dict[str, Any] = {"model": self.model, "prompt": self._prompt, "max_tokens": 1}
        left = max(until - time.monotonic(), 0.1)
        answer = client.post(f"{self.url}/v1/completions", json=body, timeout=left).raise_for_status()
        answer.json()["choices"][0]["text"]

    def peak_memory(self) -> int:
        """Return the largest sum of proportional set sizes (PSS) over the tree so far, in bytes.

        Shared pages count once. If the kernel does not reveal PSS, return the largest sum of RSS instead.
        """
        self._measure()
        return self._peak.pss or self._peak.rss

    def _poll(self) -> None:
        while not self._ending.wait(_POLL_SECONDS):
            self._measure()

    def _measure(self) -> None:
        """Add the memory of the present processes to the peak, and note the processes."""
        if self._process is not None and self._process.returncode is None:
            found = tree(self._process.pid)
            # Remember every process ever seen, because orphans leave the tree.
            self._seen.update((one.pid, one) for one in found)
            self._peak = self._peak.with_sample(sample(found, self._peak))

    def stop(self, seconds: float = 20.0) -> int | None:
        """Send SIGTERM, wait up to ``seconds``, then send SIGKILL to the rest of the tree. Idempotent.

        Return the exit status of the command (negative: the signal), or None if never started.
        """
        process = self._process
        if process is None:
            return None
        self._measure()
        self._ending.set()
        if self._poller is not None:
            self._poller.join(_KILL_SECONDS)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        self._kill_tree(process)
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait(_KILL_SECONDS)
            if self._reaper.stdin is not None:
                self._reaper.stdin.close()
        return process.returncode

    def _kill_tree(self, process: subprocess.Popen[bytes]) -> None:
        """Kill every process of the tree that still runs, including orphans.

        Waits up to ``_KILL_SECONDS`` for their end; raises TimeoutExpired if the command itself survives.
        """
        # Members may have left the process group or lost the parent, so kill by id, too.
        left = [one for one in self._seen.values() if one.pid != process.pid]
        if process.returncode is None:
            left = [*left, *tree(process.pid)]
            process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in left:
            one.kill()
        process.wait(_KILL_SECONDS)
        until = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < until and any(one.is_alive() for one in left):
            time.sleep(0.02)

    def _log_tail(self) -> str:
        """Return the end of the log for an error message; "" without a log."""
        if self._log_path is None:
            return ""
        try:
            text = self._log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return f"; the end of its log:\n{text[-_LOG_TAIL:]}"

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def reaper(group: int) -> subprocess.Popen[bytes]:
    """Start a process that kills the process group when this process ends in any way, and return it.

    The end of this process closes the standard input of the new process. SIGKILL works on stopped processes,
    too.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read _; kill -9 -{group}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
