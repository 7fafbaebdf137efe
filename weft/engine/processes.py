"""How a server starts its processes, and spare ones that have started already.

Most of the time in which a process starts goes into importing torch. So a server keeps a process that has
done that and waits to be told what it is to be: the next head or worker that is started again is that one.
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
"""Seconds after a process started from nothing until a spare one does: both import, and would share cores."""
AFTER_SPARE_S = 2.0
"""The same after a spare one was put to use: it loads weights, and has prompts to compute again."""
TELL_S = 5.0
"""Seconds in which a spare process must take what it is told; more than fits a socket it reads at once."""
AGAIN_S = 60.0
"""Seconds until another spare process is tried where one cannot be started."""
SIZE = struct.Struct("!I")
"""Of an order, before it; the descriptors come with it."""
MOST_DESCRIPTORS = 16


class Command(NamedTuple):
    """A process of ``weft.launch``, whose parent is this one."""

    program: str
    """A module of ``weft.launch``: its arguments are the parent's id, ``arguments``, and descriptors."""
    arguments: tuple[str, ...]
    setup: bytes
    """What it reads from its standard input."""
    environment: Mapping[str, str | None] = {}
    """What it has besides this process's; None takes a variable out."""
    descriptors: tuple[int, ...] = ()
    """What it inherits; it is told the numbers that they have there."""


Start: TypeAlias = Callable[[Command], "subprocess.Popen[bytes]"]


class Order(msgspec.Struct, frozen=True):
    """What a spare process is told, before its setup."""

    program: str
    arguments: list[str]
    """Without the parent, which it knows."""
    environment: dict[str, str]
    """All of it."""


def start_process(command: Command) -> subprocess.Popen[bytes]:
    """Starts it; does not wait for it. The kernel ends it with the thread that calls this. Raises OSError."""
    words = [sys.executable, "-m", f"weft.launch.{command.program}", str(os.getpid()), *command.arguments]
    with signals.blocked():
        process = subprocess.Popen(
            [*words, *map(str, command.descriptors)],
            stdin=subprocess.PIPE,
            env=env.child_environment(**command.environment),
            pass_fds=command.descriptors,
        )
    assert process.stdin is not None
    # A process that died before it read its setup: its owner sees its exit status.
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(command.setup)
    return process


class _Spare(NamedTuple):
    process: subprocess.Popen[bytes]
    link: socket.socket

    def become(self, command: Command) -> bool:
        """Tells it what it is to be; False: it cannot be told."""
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
                socket.send_fds(self.link, [SIZE.pack(len(data))], command.descriptors)
                self.link.sendall(data)
                self.link.sendall(command.setup)
            except OSError:  # it has died, or stands still
                return False
        return True

    def end(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()


class Spares:
    """At most ``most`` spare processes. ``start`` and ``close`` may be called from any thread.

    A thread of its own starts them: the kernel ends a process with the thread that made it. So ``close`` is
    called after all that ``start`` returned have ended.
    """

    def __init__(self, most: int, after: tuple[float, float] = (AFTER_S, AFTER_SPARE_S)) -> None:
        """``after``: ``AFTER_S`` and ``AFTER_SPARE_S``. There is none before a process was started."""
        self._most = most
        self._after, self._after_spare = after
        self._spares: list[_Spare] = []
        self._due: float | None = None
        """When a spare may be started; None before any process was."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weft-spares", daemon=True)
        if most:
            self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of those that wait."""
        with self._changed:
            return [spare.process.pid for spare in self._spares]

    def start(self, command: Command) -> subprocess.Popen[bytes]:
        """A spare process that becomes what ``command`` says, or a new one. See ``start_process``."""
        while (spare := self._take()) is not None:
            if spare.become(command):
                return spare.process
            log.warning("a spare process has ended, or stands still: another one is started")
            spare.end()
        return start_process(command)

    def close(self) -> None:
        """Ends those that wait. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _take(self) -> _Spare | None:
        with self._changed:
            spare = self._spares.pop(0) if self._spares else None
            self._due = time.monotonic() + (self._after if spare is None else self._after_spare)
            self._changed.notify_all()
            return spare

    def _run(self) -> None:
        while self._wait():
            try:
                spare = _start_spare()
            except OSError as error:  # for want of memory or processes: ordinary starts say so, too
                log.warning("a spare process cannot be started: %s", error)
                with self._changed:
                    self._due = time.monotonic() + AGAIN_S
                continue
            with self._changed:
                self._spares.append(spare)
        for spare in self._spares:
            spare.end()

    def _wait(self) -> bool:
        """Until a spare process is to be started; False: they are closed."""
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
    ours, theirs = socket.socketpair()
    try:
        with theirs, signals.blocked():
            process = subprocess.Popen(
                [sys.executable, "-m", "weft.launch.spare_main", str(os.getpid())],
                stdin=theirs.fileno(),
                env=env.child_environment(),
            )
    except BaseException:
        ours.close()
        raise
    return _Spare(process, ours)
