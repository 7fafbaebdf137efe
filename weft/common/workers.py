"""Worker processes for an event loop, for work that holds the GIL for long or needs much memory.

A pool sends each process one payload at a time over a socket pair and receives one answer. Payloads and
answers are framed by length. A dead or late process fails only its payload. Processes start on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import io
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, NamedTuple, TypeAlias

from weft.common import signals
from weft.common.allocator import keep_heap_small, trim_heap
from weft.common.errors import DeadlineExceeded, Overloaded, Unavailable, WeftError
from weft.common.log import get_logger

log = get_logger(__name__)

HEADER = struct.Struct("<I")
"""Length in bytes, before each payload and answer."""
MAX_WAITING = 1024
"""Maximum waiting payloads."""
CLIENT_WAITING = 512
"""Maximum waiting payloads of one client, where clients are distinguished."""
BYTES_PER_SECOND = 1 << 20
"""Payload bytes that delay a payload by one second in the queue. Small payloads go first, but none
starves."""
PIECE = 256 << 10
"""Bytes of an answer received at once, before other tasks of the event loop run."""


class WorkerDied(WeftError):
    """A process died during a payload, or sent no readable answer."""


class CpuSpent(DeadlineExceeded):
    """A payload exceeded the CPU time limit. A retry would exceed the limit again."""


class _Waiting(NamedTuple):
    turn: float
    number: int
    client: int
    cost: float
    payload: tuple[bytes | memoryview, ...]
    answer: asyncio.Future[bytes | bytearray]


def most_of_client(most: int) -> int:
    """Return how many processes of a pool of ``most`` one client may use: all except one, and at least
    one.
    """
    return max(most - 1, 1)


class WorkerPool:
    """Worker processes, and the tasks waiting for answers. Used from one event loop until ``close``."""

    def __init__(
        self, command: Sequence[str], greeting: bytes, most: int, seconds: float, each: int = 0
    ) -> None:
        """``command``: starts a process. The process must ignore stop signals (``signals.ignore``) and end at
        the end of the socket. The number of the socket's descriptor is appended. ``greeting``: first payload
        of a process, without an answer. ``most``: maximum processes. ``seconds``: deadline of one payload.
        ``each``: maximum processes for one client (numbered from 0), even if others are idle; 0 means all
        processes.
        """
        self._command = tuple(command)
        self._greeting = greeting
        self._most = most
        self._each = each or most
        self._seconds = seconds
        self._waiting: dict[int, list[_Waiting]] = {}
        """Client -> heap of waiting payloads. No heap is empty."""
        self._count = 0
        """Number of payloads in ``_waiting``."""
        self._now = 0.0
        """Virtual time: start time of the payload taken last."""
        self._ends: dict[int, float] = {}
        """Client -> virtual end time of the client's work, for end times after ``_now``."""
        self._numbers = itertools.count()
        self._idle: list[_Worker] = []
        self._busy: dict[asyncio.Task[None], int] = {}
        """Task with a process -> client."""
        self._closed = False

    async def call(
        self, *payload: bytes | memoryview, client: int = -1, cost: float = 1.0
    ) -> bytes | bytearray:
        """Send a payload in pieces to a process and return the answer. The pieces are not copied here.

        ``client``: the caller's client. Waiting clients share the processes equally, measured in ``cost``
        (any unit, the same for all payloads). Client -1 stands for all callers that are not distinguished.

        A cancelled caller leaves the process at work, within the deadline. Raises Overloaded when too many
        payloads wait, DeadlineExceeded past the deadline, the subclass CpuSpent past the CPU time given to
        ``serve``, WorkerDied when the process died during the payload, and Unavailable after ``close``.
        """
        if self._closed:
            raise Unavailable("the server is shutting down")
        if self._count >= MAX_WAITING or (
            client >= 0 and len(self._waiting.get(client, ())) >= CLIENT_WAITING
        ):
            raise Overloaded("too many requests wait to be read; try again later")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes | bytearray] = loop.create_future()
        turn = loop.time() + sum(map(len, payload)) / BYTES_PER_SECOND
        waiting = self._waiting.setdefault(client, [])
        heapq.heappush(waiting, _Waiting(turn, next(self._numbers), client, cost, payload, answer))
        self._count += 1
        self._dispatch()
        return await answer

    def _dispatch(self) -> None:
        """Start waiting payloads while processes are available. Abandoned payloads are dropped."""
        while len(self._busy) < self._most and (clients := self._clients()):
            item = self._next(clients)
            if item.answer.done():  # the request has ended
                continue
            task = asyncio.create_task(self._work(self._take_idle(), item))
            self._busy[task] = item.client

    def _clients(self) -> list[int]:
        """Return the waiting clients that may use one more process.

        A running payload is not interrupted. The limit of processes per client therefore keeps a process free
        for other clients.
        """
        busy = list(self._busy.values())
        return [one for one in self._waiting if one < 0 or busy.count(one) < self._each]

    def _next(self, clients: Iterable[int]) -> _Waiting:
        """Remove and return the next payload: from the client, among ``clients``, with the earliest virtual
        start time.

        Start-time fair queueing. A client without earlier work starts at ``_now``, so idle time earns no
        credit. An abandoned payload costs the client nothing.
        """
        client = min(clients, key=lambda one: max(self._now, self._ends.get(one, 0.0)))
        waiting = self._waiting[client]
        item = heapq.heappop(waiting)
        self._count -= 1
        if not waiting:
            del self._waiting[client]
        if not item.answer.done():
            self._now = max(self._now, self._ends.get(client, 0.0))
            self._ends = {one: end for one, end in self._ends.items() if end > self._now}
            self._ends[client] = self._now + item.cost
        return item

    def _take_idle(self) -> _Worker | None:
        """Return a living idle process, or None. Dead processes are reaped."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()  # the process died while idle
        return None

    async def _work(self, worker: _Worker | None, item: _Waiting) -> None:
        """Send one payload to a process (None: a new process) and set the answer or the error.

        A healthy process is reused, any other is killed. Then the next payload starts.
        """
        try:
            async with asyncio.timeout(self._seconds):
                if worker is None:
                    worker = await _Worker.start(self._command, self._greeting)
                answer = await worker.exchange(*item.payload)
            if not item.answer.done():
                item.answer.set_result(answer)
            if self._closed:
                worker.kill()
            else:
                self._idle.append(worker)
        # Also after cancellation: a process in the middle of an answer cannot be reused.
        except BaseException as error:
            if worker is not None:
                worker.kill()
            if not item.answer.done():
                item.answer.set_exception(_failure(error))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._busy.pop(task, None)
            self._dispatch()

    @property
    def processes(self) -> int:
        """Number of live processes."""
        return len(self._idle) + len(self._busy)

    async def close(self) -> None:
        """End every process, cancel running calls and wait for their end.

        All open callers get Unavailable; later calls raise Unavailable.
        """
        self._closed = True
        waiting = [item for each in self._waiting.values() for item in each]
        self._waiting = {}
        self._count = 0
        for item in waiting:
            if not item.answer.done():
                item.answer.set_exception(Unavailable("the server is shutting down"))
        busy = list(self._busy)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        for worker in self._idle:
            worker.kill()
        self._idle.clear()


def _failure(error: BaseException) -> WeftError:
    """Return the error for the caller; an unexpected error is logged as the death of a process."""
    if isinstance(error, CpuSpent):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("reading the request took longer than this server allows")
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("the server is shutting down")
    log.error("a worker process failed: %s", type(error).__name__)
    return WorkerDied("the server failed to read this request")


Answer: TypeAlias = Callable[[bytes], Sequence[bytes | bytearray | memoryview]]
"""The work of a worker process: payload -> answer in pieces."""


def serve(
    prepare: Callable[[bytes], Answer],
    niceness: int,
    cpu_seconds: float = 0.0,
    *,
    reports_ready: bool = False,
) -> None:
    """Run a worker process: answer payloads until the pool closes the inherited socket.

    ``prepare`` gets the greeting and returns the function for payloads. ``niceness``: lowers the priority
    below engine steps and other requests. ``cpu_seconds``: CPU time per payload, after which SIGPROF ends the
    process; 0 for no limit. The kernel enforces the limit, also inside a native call and for abandoned
    payloads. ``reports_ready``: send an empty answer after ``prepare``, as a ``Guard`` expects.
    """
    signals.ignore()  # the pool ends workers by closing the socket
    with contextlib.suppress(OSError):
        os.nice(niceness)
    with (
        contextlib.suppress(ConnectionError),  # the pool is gone
        socket.socket(fileno=int(sys.argv[-1])) as link,
        link.makefile("rwb") as stream,
    ):
        keep_heap_small()
        answer_to = prepare(_receive(stream))
        if reports_ready:
            stream.write(HEADER.pack(0))
            stream.flush()
        while payload := _receive(stream):
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            answer = answer_to(payload)
            signal.setitimer(signal.ITIMER_PROF, 0)
            del payload
            stream.writelines((HEADER.pack(sum(map(len, answer))), *answer))
            stream.flush()
            del answer
            trim_heap()


def _receive(stream: IO[bytes] | io.BufferedRWPair) -> bytes:
    """Return the next payload; empty at the end of the stream."""
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""


class _Worker:
    """One process with a socket."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str], greeting: bytes) -> _Worker:
        """Start a process and send ``greeting``. Raises OSError if the process cannot be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with signals.blocked():
                    process = subprocess.Popen(
                        [*command, str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                    )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            await worker._send(greeting)
        except BaseException:
            worker.kill()
            raise
        return worker

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def _ended(self) -> int | None:
        """Return the exit status of a process with a closed socket, or None if the process still runs."""
        for _ in range(20):
            if (code := self._process.poll()) is not None:
                return code
            await asyncio.sleep(0.01)  # the socket closes shortly before the exit status is available
        return None

    async def exchange(self, *payload: bytes | memoryview) -> bytes | bytearray:
        """Send a payload and return the answer. Raises CpuSpent when the CPU limit ended the process, and
        EOFError or OSError when the process died otherwise.
        """
        try:
            return await self._exchange(*payload)
        except (EOFError, OSError):
            if await self._ended() == -signal.SIGPROF:
                raise CpuSpent("reading the request took more CPU time than this server allows") from None
            raise

    async def _exchange(self, *payload: bytes | memoryview) -> bytes | bytearray:
        """Send a payload and return the answer. Raises EOFError or OSError when the process dies."""
        await self._send(*payload)
        (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if size <= PIECE:
            return await self._reader.readexactly(size)
        answer = bytearray(size)  # filled in pieces: a single large copy would block the event loop
        filled = 0
        while filled < size:
            piece = await self._reader.read(min(PIECE, size - filled))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size - filled)
            answer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return answer

    async def _send(self, *payload: bytes | memoryview) -> None:
        self._writer.writelines((HEADER.pack(sum(map(len, payload))), *payload))
        await self._writer.drain()

    def kill(self) -> None:
        """Kill the process without waiting for the end."""
        self._writer.close()
        self._process.kill()
        # A thread reaps the process, so that the event loop does not wait.
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)
