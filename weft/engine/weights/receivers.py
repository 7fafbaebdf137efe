"""The receivers of an engine: one process for each rank, in the group of a trainer.

    join ──► one process per rank ──all joined──► receive ──all have the file──► the file may be staged
                 └── a receiver fails, ends or is late: all receivers end, and the trainer must join again

A group with a lost member cannot broadcast, so all receivers end together. This module never changes the
weights in use.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from weft.common.errors import ErrorInfo, InvalidRequest, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.config.devices import available_memory
from weft.engine.weights.receiver import LINE, Progress, ReceiverSetup
from weft.store.announced import broadcasts, sizes
from weft.store.new_weights import SHARED
from weft.types.weights import JoinTrainer, ReceiveWeights

log = get_logger(__name__)

START_S = 30.0
"""Maximum seconds for the start of a process, in addition to the time-out of the group."""
LATE_S = 5.0
"""Seconds beyond the time-out of a broadcast until a receiver is killed."""
SETTLE_S = 1.0
"""Seconds between the first failure of a receiver and the answer. A later failure may show the cause."""
END_S = 5.0
"""Maximum seconds for a receiver to read a task, and to end after a kill."""
Start: TypeAlias = Callable[[bytes, int], "subprocess.Popen[bytes]"]
"""Function from (standard input, descriptor of the link) to a process."""
_AGAIN = "POST /init_weight_transfer_engine forms a new group"


class _Receiver:
    """One process, and its link."""

    def __init__(self, setup: ReceiverSetup, start: Start) -> None:
        self.link, theirs = socket.socketpair()
        self.link.setblocking(False)
        with theirs:
            self.process = start(msgspec.msgpack.encode(setup), theirs.fileno())
        self._data = b""
        self.rank = setup.rank
        self.done: Progress | None = None
        """The last report of a complete task; None while a task runs."""
        self.error: ErrorInfo | None = None
        self.died = False
        """True after an end without a report."""

    def begin(self, line: bytes) -> None:
        """Send a task. Blocks until the process has read the line, at most ``END_S``. Raises OSError."""
        self.done = None
        self.link.settimeout(END_S)
        self.link.sendall(line)
        self.link.setblocking(False)

    def read(self) -> bool:
        """Handle new reports, and return True if there are any."""
        has_reports = False
        while self.error is None:
            try:
                data = self.link.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.error, self.died = self._ended(), True
                return True
            has_reports = True
            *lines, self._data = (self._data + data).split(LINE)
            for line in lines:
                progress = msgspec.json.decode(line, type=Progress)
                self.error = self.error or progress.error
                if progress.done:
                    self.done = progress
        return has_reports

    def _ended(self) -> ErrorInfo:
        """Return the error of a process that ended without a report."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SETTLE_S)
        if self.process.returncode == -6:  # SIGABRT: gloo ends the process after a message that is too long
            return InvalidRequest("the trainer sent more bytes than announced", param="update_info").info()
        return Unavailable(f"receiver {self.rank} of the weights ended: {self.process.returncode}").info()

    def close(self) -> None:
        self.link.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold a killed process
            self.process.wait(END_S)


class Receivers:
    """All receivers of one engine. Used from the thread that steps: a receiver ends with the thread."""

    def __init__(
        self, ranks: int, device: str, start: Start, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``device``: "cpu", or "cuda": receiver i then uses GPU i of this process. ``start``: starts a
        process of ``weft.engine.weights.receiver``."""
        self._ranks, self._device, self._start, self._clock = ranks, device, start, clock
        self._all: list[_Receiver] = []
        """All receivers of the group; [] outside of a group."""
        self._task: JoinTrainer | ReceiveWeights | None = None
        self._seconds = 0.0
        self._until = 0.0
        """Time at which receivers without news are killed."""
        self._settled: float | None = None
        """Time at which the failure of a receiver is answered."""

    def join(self, message: JoinTrainer) -> None:
        """Begin to join the group of a trainer, in place of the last group. ``finished`` has the result.

        Raises OSError if a process cannot be started: no receiver runs then.
        """
        self.close()
        self._task, self._seconds = message, message.group.seconds
        self._until = self._clock() + self._seconds + START_S
        # With "ipc" the trainer does not count the receivers: one receiver, which writes the file, is enough.
        by_name = message.group.backend == "ipc"
        for number in range(1 if by_name else self._ranks):
            device = "cpu" if self._device == "cpu" else f"{self._device}:{number}"
            setup = ReceiverSetup(
                group=message.group, rank=message.first_rank + number, writes=number == 0, device=device
            )
            try:
                self._all.append(_Receiver(setup, self._start))
            except OSError:
                self.close()
                raise

    def receive(self, message: ReceiveWeights) -> None:
        """Begin to receive tensors. ``finished`` has the result. Raises InvalidRequest without a group, and
        if the tensors do not fit into shared memory or into the memory of the host."""
        if not self._all or self._task is not None:
            raise InvalidRequest(f"the engine is in no group of a trainer: {_AGAIN}")
        try:
            self._check_room(message)
        except InvalidRequest:
            self.close()
            raise
        self._task, self._until = message, self._clock() + self._seconds + LATE_S
        for one in self._all:
            with contextlib.suppress(OSError):  # the end of the process is reported by ``read``
                one.begin(msgspec.json.encode(message) + LINE)

    def _check_room(self, message: ReceiveWeights) -> None:
        """Raise InvalidRequest unless the file, and a buffer of each receiver, fit into memory."""
        tensors, room = message.tensors, os.statvfs(SHARED)
        total, left = sum(sizes(tensors)), room.f_bavail * room.f_frsize
        if total > left:
            raise InvalidRequest(f"the tensors have {total} bytes, and {SHARED} has {left} left")
        # A buffer has the largest broadcast. A packed broadcast needs a copy of a tensor in addition.
        largest = max(sum(count for _, count in pieces) for pieces in broadcasts(tensors))
        buffers = len(self._all) * largest * (1 + tensors.packed)
        memory = available_memory()
        if memory is not None and total + buffers > memory:
            raise InvalidRequest(
                f"the tensors need {total} bytes of memory and {buffers} bytes for buffers, and the host has "
                f"{memory} left: send them in several updates with partial, or with smaller buffers"
            )

    def finished(self) -> str | None:
        """Return the token or the file of a complete task; None while it runs. Does not block.

        Raises the error of a failed task. All receivers have ended then.
        """
        task = self._task
        if task is None:
            return None
        now = self._clock()
        new_reports = [one.read() for one in self._all]
        if any(new_reports):
            self._until = max(self._until, now + self._seconds + LATE_S)
        if error := self._failure(now):
            self.close()
            raise error
        if self._settled is not None or any(one.done is None for one in self._all):
            return None
        if len({one.done.digest for one in self._all if one.done is not None}) > 1:
            self.close()
            raise InvalidRequest(f"the ranks received different bytes: {_AGAIN}")
        self._task = None
        return task.token if isinstance(task, JoinTrainer) else task.file

    def _failure(self, now: float) -> WeftError | None:
        """Return the error of the task; None without a failure. After the first failure of a receiver, wait
        up to ``SETTLE_S`` for the failures of the other receivers."""
        errors = [one.error for one in self._all if one.error is not None]
        if not errors:
            if now < self._until:
                return None
            what = "join the group" if isinstance(self._task, JoinTrainer) else "send the next tensor"
            return Unavailable(f"the trainer did not {what} within {self._seconds:g} s: {_AGAIN}")
        self._settled = self._settled or now + SETTLE_S
        if len(errors) < len(self._all) and now < self._settled:
            return None
        # The end of one receiver ends the group, so the other receivers report a lost peer. The cause is an
        # error of the client, or else the receiver that died.
        died = [one.error for one in self._all if one.died and one.error is not None]
        first = next((one for one in errors if one.blame == "client"), (*died, *errors)[0])
        return ReportedError(msgspec.structs.replace(first, message=f"{first.message}: {_AGAIN}"))

    def close(self) -> None:
        """End all receivers."""
        task, self._task, self._settled = self._task, None, None
        for one in self._all:
            one.process.kill()
        for one in self._all:
            one.close()
            if isinstance(task, ReceiveWeights):
                name = f".{Path(task.file).name}.{one.process.pid}"
                (Path(task.file).parent / name).unlink(missing_ok=True)
        self._all = []
