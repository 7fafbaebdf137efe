"""Processes for work that may run away: bounded in CPU time and memory, and ended when late.

    thread ──payload──► process       its kernel ends the process after so much CPU time
           ◄──answer───               the thread ends the process at the deadline

``WorkerPool`` serves an event loop; a ``Guard`` serves threads, which block while a process works. Both speak
the same protocol, so a worker program is the same: ``workers.serve``.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from weft.common import signals
from weft.common.errors import DeadlineExceeded, Unavailable, WeftError
from weft.common.workers import HEADER, CpuSpent, WorkerDied

START_S = 30.0
"""Seconds that a new process may take until it is ready."""
LONG_S = 0.05
"""Seconds after which a payload is a long one."""
IDLE_S = 60.0
"""Seconds without work after which the last process ends."""
SPARE_S = 5.0
"""Seconds without work after which the others end."""


class Guard:
    """A pool of processes that run one program. Thread-safe; the number of callers bounds the processes."""

    def __init__(self, command: Sequence[str], greeting: bytes, *, idle: float = IDLE_S) -> None:
        """``command``: a program that calls ``workers.serve``. ``greeting``: its first payload. ``idle``:
        seconds after which the last process without work ends."""
        self._command = tuple(command)
        self._greeting = greeting
        self._idle_s = idle
        self._lock = threading.Lock()
        self._idle: list[tuple[float, _Process]] = []
        """(time since when, process); the one that has been idle longest comes first."""
        self._busy: set[_Process] = set()
        self._reaper: threading.Timer | None = None
        self._closed = False
        self._starting = False
        """True while a spare process starts."""

    def call(self, payload: bytes, seconds: float) -> bytes:
        """Return the answer of a process to ``payload``; start a process where none is idle.

        Raises DeadlineExceeded when ``seconds`` are over, its subclass CpuSpent when the CPU time of a
        payload is over, WorkerDied when the process died of the payload in another way, Unavailable when the
        guard is closed.
        """
        process = self._take() or self._start()
        try:
            answer = process.exchange(payload, seconds, self._prepare_spare)
        except BaseException as error:
            failure = self._failure(process, error)
            if isinstance(failure, WeftError):
                # The caller that lost a process waits for the next one, and not whoever calls next.
                with contextlib.suppress(WeftError):
                    self._put_back(self._start())
            raise failure from None
        self._put_back(process)
        return answer

    @property
    def processes(self) -> int:
        """Number of processes that live."""
        with self._lock:
            return len(self._idle) + len(self._busy)

    def close(self) -> None:
        """End every process. A caller that waits gets Unavailable."""
        with self._lock:
            self._closed = True
            if self._reaper is not None:
                self._reaper.cancel()
            for process in self._busy:
                process.kill()  # its caller reaps it
            idle, self._idle = self._idle, []
        for _, process in idle:
            process.end()

    def _failure(self, process: _Process, error: BaseException) -> BaseException:
        """End ``process``. Return the error that says why it gave no answer."""
        code = self._drop(process)
        if isinstance(error, TimeoutError):
            return DeadlineExceeded("a task took longer than its time")
        if not isinstance(error, OSError | EOFError):
            return error
        if self._closed:
            return Unavailable("the server is shutting down")
        if code == -signal.SIGPROF:
            return CpuSpent("a task took more CPU time than it may")
        return WorkerDied(f"a process died of its task (status {code})")

    def _prepare_spare(self) -> None:
        """Start a process in the background where no other is idle: a long payload is often not the last."""

        def start() -> None:
            with contextlib.suppress(WeftError):  # the next caller starts one, or says why there is none
                self._put_back(self._start())
            self._starting = False

        with self._lock:
            wanted = not self._idle and not self._starting
            self._starting |= wanted
        if wanted:
            threading.Thread(target=start, daemon=True).start()

    def _take(self) -> _Process | None:
        """Return an idle process, if there is one."""
        while True:
            with self._lock:
                if self._closed:
                    raise Unavailable("the server is shutting down")
                if not self._idle:
                    return None
                _, process = self._idle.pop()
                self._busy.add(process)
            if process.alive:
                return process
            self._drop(process)  # it died while it had no work

    def _start(self) -> _Process:
        """Return a new process that is ready."""
        try:
            process = _Process(self._command, self._greeting)
        except OSError as error:
            raise Unavailable(f"no process can be started: {error.strerror}") from None
        with self._lock:
            self._busy.add(process)
            closed = self._closed
        if closed:
            self._drop(process)
            raise Unavailable("the server is shutting down")
        try:
            process.get_ready()
        except (OSError, EOFError) as error:
            raise self._failure(process, error) from None
        return process

    def _drop(self, process: _Process) -> int | None:
        with self._lock:
            self._busy.discard(process)
        return process.end()

    def _put_back(self, process: _Process) -> None:
        with self._lock:
            self._busy.discard(process)
            closed = self._closed
            if not closed:
                self._idle.append((time.monotonic(), process))
                self._reap_later()
        if closed:
            process.end()

    def _reap_later(self) -> None:
        """Set the timer that ends idle processes, unless there is one. Under the lock."""
        if self._reaper is None:
            self._reaper = threading.Timer(min(self._idle_s, SPARE_S), self._reap)
            self._reaper.daemon = True
            self._reaper.start()

    def _reap(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._reaper = None
            last = len(self._idle) - 1
            lives = [self._idle_s if place == last else SPARE_S for place in range(len(self._idle))]
            each = list(zip(self._idle, lives, strict=True))
            old = [process for (since, process), seconds in each if now - since >= seconds]
            self._idle = [entry for entry, seconds in each if now - entry[0] < seconds]
            if self._idle and not self._closed:
                self._reap_later()
        for process in old:
            process.end()


class _Process:
    """One process and the socket to it."""

    def __init__(self, command: Sequence[str], greeting: bytes) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                with signals.blocked():
                    self._process = subprocess.Popen(
                        [*command, str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                    )
            except BaseException:
                self._socket.close()
                raise
        with contextlib.suppress(OSError):  # a process that died at once fails its first payload
            self._socket.sendall(HEADER.pack(len(greeting)) + greeting)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def get_ready(self) -> None:
        """Wait until the process can work. Raises like ``exchange``."""
        self._receive(HEADER.size, time.monotonic() + START_S)

    def exchange(self, payload: bytes, seconds: float, when_long: Callable[[], None]) -> bytes:
        """Return the answer; call ``when_long`` when there is none after ``LONG_S``.

        Raises TimeoutError, and EOFError or OSError when the process dies.
        """
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(HEADER.pack(len(payload)) + payload)
        waiting = select.poll()  # select.select takes no descriptor beyond 1,023
        waiting.register(self._socket, select.POLLIN)
        if not waiting.poll(1000 * min(LONG_S, seconds)):
            when_long()
        (size,) = HEADER.unpack(self._receive(HEADER.size, deadline))
        return self._receive(size, deadline)

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            piece = self._socket.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def kill(self) -> None:
        """End the process at once; ``end`` reaps it."""
        self._process.kill()

    def end(self) -> int | None:
        """End the process, unless it has ended. Return its exit status."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # a process that broke off the exchange is about to end: its own status says why
            self._process.wait(0.05 if self._process.poll() is None else None)
        self._process.kill()
        return self._process.wait()
