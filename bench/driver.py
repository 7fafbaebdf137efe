"""Run driver processes for the comparison: requests with deadlines, and processes stopped between turns."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.protocol import tree
from weft.bench.process import reaper


class PeerError(Exception):
    """Report that a peer crashed, returned an error or missed a deadline. The message has the peer's last
    lines.
    """


def last_lines(log: Path, count: int = 15) -> str:
    """Return the last lines of a log, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line[:300] for line in lines[-count:] if line.strip())


def pinned(command: Sequence[str], threads: int) -> list[str]:
    """Return ``command`` pinned to ``threads`` CPUs, if more CPUs and taskset exist."""
    cpus = sorted(os.sched_getaffinity(0))
    if threads >= len(cpus) or not shutil.which("taskset"):
        return list(command)
    return ["taskset", "-c", ",".join(map(str, cpus[:threads])), *command]


def signal_tree(root: int, number: signal.Signals) -> None:
    """Send a signal to a process and all descendants. Skip processes that are gone."""
    for pid in tree(root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_tree(process: subprocess.Popen[Any], grace_s: float = 20) -> None:
    """End a process and all descendants: SIGTERM first, then SIGKILL for survivors after ``grace_s``."""
    pids = tree(process.pid) if process.poll() is None else []
    for what, wait in ((signal.SIGCONT, 0.0), (signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)
        until = time.monotonic() + wait
        while time.monotonic() < until and any(map(_alive, pids)):
            process.poll()  # reap the process, so that ``_alive`` does not count a zombie
            time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Driver:
    """Own one driver process and its descendants. ``close`` and the death of the parent end the whole
    tree.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._rest = b""
        self._errors = log.open("wb")
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._reaper = reaper(self.process.pid)

    def ask(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send one message and return the answer. Raise PeerError if the driver dies, returns an error or is
        late.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"the driver ended\n{last_lines(self.log)}") from None
        answer = json.loads(self._line(deadline_s))
        if "error" in answer:
            raise PeerError(f"{answer['error']}\n{last_lines(self.log)}")
        return dict(answer)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Run the process tree inside the context and stop the tree afterwards, so that idle spinning
        disturbs no peer.
        """
        signal_tree(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            signal_tree(self.process.pid, signal.SIGSTOP)

    def close(self) -> None:
        """Ends the tree. Idempotent."""
        end_tree(self.process)
        self._reaper.kill()
        self._reaper.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors, self._reaper.stdin):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _line(self, deadline_s: float) -> bytes:
        assert self.process.stdout is not None
        until = time.monotonic() + deadline_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise PeerError(f"no answer within {deadline_s:.0f} s\n{last_lines(self.log)}")
            data = os.read(self.process.stdout.fileno(), 1 << 20)
            if not data:
                status = self.process.wait(10)
                raise PeerError(f"the driver ended with status {status}\n{last_lines(self.log)}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line
