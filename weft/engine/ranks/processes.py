"""Starts the processes of a server, and keeps spare processes.

Most of a process start is the import of torch. So a server keeps spare processes, which have imported torch
and wait for an order. The next restart of an engine process or worker uses a spare process. The first engine
process uses one, too: ``at_once`` starts the import before the server has read the configuration.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from weft.common import env, signals
from weft.common.log import get_logger

log = get_logger(__name__)

AFTER_S = 5.0
"""Seconds between a cold start and the start of a spare process. Both import torch and would compete for
cores.
"""
AFTER_SPARE_S = 2.0
"""Seconds between the use of a spare process and the start of the next. The used process loads weights and
recomputes prompts meanwhile.
"""
TELL_S = 5.0
"""Maximum seconds for a spare process to read an order larger than the socket buffer."""
AGAIN_S = 60.0
"""Seconds between two attempts to start a spare process."""
SIZE = struct.Struct("!I")
"""Length prefix of an order. The descriptors travel with the prefix."""
MOST_DESCRIPTORS = 16


class ProcessCommand(NamedTuple):
    """A process of ``weft.cli.processes``, to start as a child process."""

    program: str
    """A module of ``weft.cli.processes``. The arguments are the parent's process id, ``arguments`` and
    descriptor numbers.
    """
    arguments: tuple[str, ...]
    setup: bytes
    """Bytes for the standard input of the process."""
    environment: Mapping[str, str | None] = {}
    """Changes to the environment; None removes a variable."""
    descriptors: tuple[int, ...] = ()
    """Inherited descriptors. The process receives the numbers as arguments."""


Start: TypeAlias = Callable[[ProcessCommand], "subprocess.Popen[bytes]"]


class Order(msgspec.Struct, frozen=True):
    """The order for a spare process, sent before the setup."""

    program: str
    arguments: list[str]
    """Arguments without the parent's process id, which the spare process knows."""
    environment: dict[str, str]
    """The complete environment."""


def start_process(command: ProcessCommand) -> subprocess.Popen[bytes]:
    """Start the process and return a handle. Does not wait for the process to be ready. Raises OSError.

    The kernel kills the process when the calling thread ends.
    """
    words = [
        sys.executable,
        "-m",
        f"weft.cli.processes.{command.program}",
        str(os.getpid()),
        *command.arguments,
    ]
    with signals.blocked():
        process = subprocess.Popen(
            [*words, *map(str, command.descriptors)],
            stdin=subprocess.PIPE,
            env=env.child_environment(**command.environment),
            pass_fds=command.descriptors,
        )
    assert process.stdin is not None
    # If the process died before reading the setup, the owner sees the exit status.
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(command.setup)
    return process


def start_receiver(setup: bytes, link: int) -> subprocess.Popen[bytes]:
    """Start a receiver of new weights (``weft.engine.weights.receivers``). Raises OSError."""
    return start_process(ProcessCommand("receiver_main", (), setup, descriptors=(link,)))


class _Spare(NamedTuple):
    process: subprocess.Popen[bytes]
    link: socket.socket

    def become(self, command: ProcessCommand) -> bool:
        """Send the order for ``command`` and close the link.

        Return False if the process is dead or does not read within ``TELL_S`` seconds.
        """
        order = Order(
            program=command.program,
            arguments=list(command.arguments),
            environment=env.child_environment(**command.environment),
        )
        data = msgspec.msgpack.encode(order)
        with self.link:
            if self.process.poll() is not None:
                return False
            self.link.settimeout(TELL_S)
            try:
                # The descriptors travel with the length, in one message.
                socket.send_fds(self.link, [SIZE.pack(len(data))], command.descriptors)
                self.link.sendall(data)
                self.link.sendall(command.setup)
            except OSError:  # the process has died or hangs
                return False
        return True

    def end(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()


class Spares:
    """Up to ``most`` spare processes. ``start`` and ``close`` are safe from any thread.

    A dedicated thread starts the spare processes, and the kernel kills a process at the end of the starting
    thread. So call ``close`` only after all processes returned by ``start`` have ended.
    """

    def __init__(
        self, most: int, after: tuple[float, float] = (AFTER_S, AFTER_SPARE_S), at_once: bool = False
    ) -> None:
        """``most``: number of spare processes; 0 for none.

        ``after``: delays in place of ``AFTER_S`` and ``AFTER_SPARE_S``. ``at_once``: start a process now, for
        the first ``start``, even with ``most`` 0; call from the main thread. All others are started only
        after a call of ``start``.
        """
        self._most = most
        self._after, self._after_spare = after
        self._spares: list[_Spare] = []
        self._due: float | None = None
        """Time from which a spare process may be started; None before the first ``start``."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weft-spares", daemon=True)
        if at_once:
            # Without memory or processes, the start of the engine reports the error.
            with contextlib.suppress(OSError):
                self._spares.append(_start_spare())
        if most:
            self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the idle spare processes."""
        with self._changed:
            return [spare.process.pid for spare in self._spares]

    def start(self, command: ProcessCommand) -> subprocess.Popen[bytes]:
        """Turn a spare process into ``command``, or start a new process.

        Return the process. A spare process that hangs is logged and killed. Raises OSError.
        """
        while (spare := self._take()) is not None:
            if spare.become(command):
                return spare.process
            log.warning("a spare process has ended or hangs: starting another process")
            spare.end()
        return start_process(command)

    def close(self) -> None:
        """End the idle spare processes. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        while self._spares:
            self._spares.pop().end()

    def _take(self) -> _Spare | None:
        """Remove and return the oldest spare process, or None. Schedules the start of the next."""
        with self._changed:
            spare = self._spares.pop(0) if self._spares else None
            # The processes of a starting server load and compute for longer than a restarted process.
            cold = spare is None or self._due is None
            self._due = time.monotonic() + (self._after if cold else self._after_spare)
            self._changed.notify_all()
            return spare

    def _run(self) -> None:
        """Start spare processes when due, until ``close``.

        A failed start is logged and tried again after ``AGAIN_S`` seconds.
        """
        while self._wait():
            try:
                spare = _start_spare()
            except OSError as error:  # out of memory or processes: normal starts report the error, too
                log.warning("a spare process cannot be started: %s", error)
                with self._changed:
                    self._due = time.monotonic() + AGAIN_S
                continue
            with self._changed:
                self._spares.append(spare)

    def _wait(self) -> bool:
        """Block until a spare process is due. Return False after ``close``."""
        with self._changed:
            while not self._closed:
                left = None
                if self._due is not None and len(self._spares) < self._most:
                    left = self._due - time.monotonic()
                    if left <= 0:
                        return True
                self._changed.wait(left)
            return False


def _start_spare() -> _Spare:
    """Start a process that imports torch and waits for an order on the returned link. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, signals.blocked():
            process = subprocess.Popen(
                [sys.executable, "-m", "weft.cli.processes.spare_main", str(os.getpid())],
                stdin=theirs.fileno(),
                env=env.child_environment(),
            )
    except BaseException:
        ours.close()
        raise
    return _Spare(process, ours)
