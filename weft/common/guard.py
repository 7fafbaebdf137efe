"""Run work of unpredictable cost in processes with a limit of CPU time and a deadline.

    thread ──payload──► process       the kernel ends the process past the CPU time
           ◄──answer───               the thread ends the process at the deadline

``WorkerPool`` serves an event loop. ``Guard`` serves threads, which block while a process works. Both use the
same worker program: ``workers.serve``.
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
"""Maximum seconds for a new process to become ready."""
LONG_S = 0.05
"""Seconds after which a payload counts as long."""
IDLE_S = 60.0
"""Idle seconds after which the last process ends."""
SPARE_S = 5.0
"""Idle seconds after which the other processes end."""


class Guard:
    """A pool of processes for one program. Thread-safe; the number of callers bounds the processes."""

    def __init__(self, command: Sequence[str], greeting: bytes, *, idle: float = IDLE_S) -> None:
        """``command``: a program that calls ``workers.serve``.

        ``greeting``: first payload of a process. ``idle``: idle seconds after which the last process ends.
        Processes start at the first call.
        """
        self._command = tuple(command)
        self._greeting = greeting
        self._idle_s = idle
        self._lock = threading.Lock()
        self._idle: list[tuple[float, _Process]] = []
        """(idle since, process), the process with the longest idle time first."""
        self._busy: set[_Process] = set()
        self._reaper: threading.Timer | None = None
        self._closed = False
        self._starting = False
        """True while a spare process starts."""

    def call(self, payload: bytes, seconds: float) -> bytes:
        """Send ``payload`` to an idle or new process and return the answer.

        Blocks up to ``seconds``, plus a process start.

        Any failure ends the process. Raises DeadlineExceeded past ``seconds``, the subclass CpuSpent past the
        CPU time of a payload, WorkerDied when the process died otherwise, and Unavailable after ``close`` or
        when no process can be started.
        """
        process = self._take() or self._start()
        try:
            answer = process.exchange(payload, seconds, self._prepare_spare)
        except BaseException as error:
            failure = self._failure(process, error)
            if isinstance(failure, WeftError):
                # Start the replacement now, so that the next caller does not wait for the start.
                with contextlib.suppress(WeftError):
                    self._put_back(self._start())
            raise failure from None
        self._put_back(process)
        return answer

    @property
    def processes(self) -> int:
        """Number of live processes."""
        with self._lock:
            return len(self._idle) + len(self._busy)

    def close(self) -> None:
        """End every process, and stop the timer.

        Blocked callers get Unavailable. Later calls raise Unavailable.
        """
        with self._lock:
            self._closed = True
            if self._reaper is not None:
                self._reaper.cancel()
            for process in self._busy:
                process.kill()  # the caller reaps the process
            idle, self._idle = self._idle, []
        for _, process in idle:
            process.end()

    def _failure(self, process: _Process, error: BaseException) -> BaseException:
        """End ``process`` and return the error to raise in place of ``error``: ``error`` itself unless the
        process failed.
        """
        code = self._drop(process)
        if isinstance(error, TimeoutError):
            return DeadlineExceeded("a task took longer than its time")
        # Not an error of the process, such as an interrupt of the caller: raise unchanged.
        if not isinstance(error, OSError | EOFError):
            return error
        if self._closed:
            return Unavailable("the server is shutting down")
        if code == -signal.SIGPROF:
            return CpuSpent("a task took more CPU time than it may")
        return WorkerDied(f"a process died of its task (status {code})")

    def _prepare_spare(self) -> None:
        """Start a process in a thread if no process is idle: a second long payload often follows.

        Errors are ignored.
        """

        def start() -> None:
            with contextlib.suppress(WeftError):  # the next caller starts a process, or reports the error
                self._put_back(self._start())
            self._starting = False

        with self._lock:
            wanted = not self._idle and not self._starting
            self._starting |= wanted
        if wanted:
            threading.Thread(target=start, daemon=True).start()

    def _take(self) -> _Process | None:
        """Return an idle process, now busy, or None.

        Dead processes are dropped. Raises Unavailable after ``close``.
        """
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
            self._drop(process)  # the process died while idle

    def _start(self) -> _Process:
        """Return a new, ready process. Raises Unavailable, DeadlineExceeded or WorkerDied."""
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
        """Make a process idle and set the timer of idle processes; after ``close``, end the process."""
        with self._lock:
            self._busy.discard(process)
            closed = self._closed
            if not closed:
                self._idle.append((time.monotonic(), process))
                self._reap_later()
        if closed:
            process.end()

    def _reap_later(self) -> None:
        """Set the timer for ending idle processes, unless already set. Call with the lock held."""
        if self._reaper is None:
            self._reaper = threading.Timer(min(self._idle_s, SPARE_S), self._reap)
            self._reaper.daemon = True
            self._reaper.start()

    def _reap(self) -> None:
        """End processes that were idle too long, and set the timer again while processes are idle."""
        now = time.monotonic()
        with self._lock:
            self._reaper = None
            # The last entry is the most recently used process, which may stay idle for longest.
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
    """One process with a socket."""

    def __init__(self, command: Sequence[str], greeting: bytes) -> None:
        """Start a process and send ``greeting``. Raises OSError if the process cannot be started."""
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
        """Block until the process is ready. Raises the errors of ``exchange``."""
        self._receive(HEADER.size, time.monotonic() + START_S)

    def exchange(self, payload: bytes, seconds: float, when_long: Callable[[], None]) -> bytes:
        """Send the payload and return the answer. Call ``when_long`` once if there is no answer after
        ``LONG_S``.

        Raises TimeoutError past ``seconds``, and EOFError or OSError when the process dies.
        """
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(HEADER.pack(len(payload)) + payload)
        waiting = select.poll()  # select.select supports no descriptor above 1,023
        waiting.register(self._socket, select.POLLIN)
        if not waiting.poll(1000 * min(LONG_S, seconds)):
            when_long()
        (size,) = HEADER.unpack(self._receive(HEADER.size, deadline))
        return self._receive(size, deadline)

    def _receive(self, size: int, deadline: float) -> bytes:
        """Return exactly ``size`` bytes.

        Raises TimeoutError past ``deadline`` (monotonic), EOFError at the end.
        """
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
        """Kill the process at once. ``end`` reaps the process."""
        self._process.kill()

    def end(self) -> int | None:
        """End the process, unless already ended, and return the exit status (negative: the signal). Waits."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A failed process is about to exit. Wait briefly: the exit status gives the reason.
            self._process.wait(0.05 if self._process.poll() is None else None)
        self._process.kill()
        return self._process.wait()
