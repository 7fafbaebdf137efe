"""Processes that do long work for an event loop: what would hold Python's lock, or much memory, for long.

A pool sends each of its processes one payload at a time over a socket pair and takes one answer back, both
framed by their length. A process that dies, or takes longer than its deadline, fails the payload that it had
and nothing else; the next payload starts a new one. Processes start when there is work for them.
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
"""Before each payload and answer: its length in bytes."""
MAX_WAITING = 1024
"""Payloads that may wait for a process."""
CLIENT_WAITING = 512
"""Payloads of one client that may wait, where clients are told apart."""
BYTES_A_SECOND = 1 << 20
"""A payload waits as if it had come this much later a byte, so that small ones go first and none starves."""
PIECE = 256 << 10
"""Bytes of an answer that are taken at once, before the event loop's other tasks get their turn."""


class WorkerDied(WeftError):
    """A process died of its payload, or gave no answer that can be read."""


class CpuSpent(DeadlineExceeded):
    """A payload took more CPU time than it may: it would again."""


class _Waiting(NamedTuple):
    turn: float
    number: int
    client: int
    cost: float
    payload: tuple[bytes | memoryview, ...]
    answer: asyncio.Future[bytes | bytearray]


def most_of_client(most: int) -> int:
    """Processes of a pool of ``most`` that one client may have: where there are two, others have one."""
    return max(most - 1, 1)


class WorkerPool:
    """Worker processes, and the tasks that wait for them. Used from one event loop. ``close`` ends it."""

    def __init__(
        self, command: Sequence[str], greeting: bytes, most: int, seconds: float, each: int = 0
    ) -> None:
        """``command``: starts a process, which ignores signals that stop servers (``signals.ignore``) and
        ends with its socket; the number of that descriptor is appended. ``greeting``: its first payload,
        which has no answer. ``most``: processes. ``seconds``: for one payload. ``each``: processes that one
        client (from 0 on) may have at a time, however few others ask; 0 stands for all of them.
        """
        self._command = tuple(command)
        self._greeting = greeting
        self._most = most
        self._each = each or most
        self._seconds = seconds
        self._waiting: dict[int, list[_Waiting]] = {}
        """By client, each a heap. No list is empty."""
        self._count = 0
        """Payloads in ``_waiting``."""
        self._now = 0.0
        """Virtual time: when the work that was taken last began."""
        self._ends: dict[int, float] = {}
        """Virtual times at which the work of clients ends, of those that are ahead of ``_now``."""
        self._numbers = itertools.count()
        self._idle: list[_Worker] = []
        self._busy: dict[asyncio.Task[None], int] = {}
        """Tasks with a process, and the client of each."""
        self._closed = False

    async def call(
        self, *payload: bytes | memoryview, client: int = -1, cost: float = 1.0
    ) -> bytes | bytearray:
        """The answer of a process to a payload in pieces, which are not copied here.

        ``client``: who asks. Clients that wait share the processes equally, counted in ``cost`` (of any unit,
        the same for all payloads). Client -1 stands for callers that are not told apart.

        A caller that is cancelled leaves the process at its work, within the deadline. Raises Overloaded when
        too many wait, DeadlineExceeded when it takes too long, its subclass CpuSpent when it takes more CPU
        time than ``serve`` allows, and WorkerDied when the process died of it.
        """
        if self._closed:
            raise Unavailable("the server is shutting down")
        if self._count >= MAX_WAITING or (
            client >= 0 and len(self._waiting.get(client, ())) >= CLIENT_WAITING
        ):
            raise Overloaded("too many requests wait to be read; try again later")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes | bytearray] = loop.create_future()
        turn = loop.time() + sum(map(len, payload)) / BYTES_A_SECOND
        waiting = self._waiting.setdefault(client, [])
        heapq.heappush(waiting, _Waiting(turn, next(self._numbers), client, cost, payload, answer))
        self._count += 1
        self._dispatch()
        return await answer

    def _dispatch(self) -> None:
        while len(self._busy) < self._most and (clients := self._clients()):
            item = self._next(clients)
            if item.answer.done():  # its request has ended
                continue
            task = asyncio.create_task(self._work(self._take_idle(), item))
            self._busy[task] = item.client

    def _clients(self) -> list[int]:
        """Clients that wait and may have one more process.

        A payload that has begun is not interrupted. So the places that a client can never have are what keeps
        its long payloads from delaying a client that comes later.
        """
        held = list(self._busy.values())
        return [one for one in self._waiting if one < 0 or held.count(one) < self._each]

    def _next(self, clients: Iterable[int]) -> _Waiting:
        """Take the next payload: of the client, among ``clients``, whose work ends first in virtual time.

        Start-time fair queueing. A client that was away begins at ``_now``, so that nobody saves up turns.
        A payload that nobody waits for any more costs its client nothing.
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
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()  # it died while it had no work
        return None

    async def _work(self, worker: _Worker | None, item: _Waiting) -> None:
        """Carries one payload to a process and its answer back. The process is kept if it is well."""
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
        """How many live."""
        return len(self._idle) + len(self._busy)

    async def close(self) -> None:
        """Ends every process; who waits gets Unavailable."""
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
    if isinstance(error, CpuSpent):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("reading the request took longer than this server allows")
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("the server is shutting down")
    log.error("a worker process failed: %s", type(error).__name__)
    return WorkerDied("the server failed to read this request")


Answer: TypeAlias = Callable[[bytes], Sequence[bytes | bytearray | memoryview]]
"""What a worker does: the answer to one payload, in pieces."""


def serve(
    prepare: Callable[[bytes], Answer], niceness: int, cpu_seconds: float = 0.0, *, tells: bool = False
) -> None:
    """The whole of a worker's process: answers payloads until the pool closes the socket that it inherited.

    ``prepare`` gets the greeting. ``niceness``: steps of the engine, and other requests, go first where cores
    are short. ``cpu_seconds``: CPU time for one payload, after which SIGPROF ends the process; 0: no limit.
    The kernel counts, so the limit holds inside a native call, and where nobody waits for the answer.
    ``tells``: the process sends an empty answer when it is ready, as a ``Guard`` expects.
    """
    signals.ignore()  # the pool ends its workers: they live as long as its socket
    with contextlib.suppress(OSError):
        os.nice(niceness)
    with (
        contextlib.suppress(ConnectionError),  # the pool is gone
        socket.socket(fileno=int(sys.argv[-1])) as link,
        link.makefile("rwb") as stream,
    ):
        keep_heap_small()
        answer_to = prepare(_receive(stream))
        if tells:
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
    """The next payload; empty when there is none any more."""
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""


class _Worker:
    """One process and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str], greeting: bytes) -> _Worker:
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
        """The status of a process that has closed its socket; None where the process lives on."""
        for _ in range(20):
            if (code := self._process.poll()) is not None:
                return code
            await asyncio.sleep(0.01)  # the kernel closes sockets a moment before the status is known
        return None

    async def exchange(self, *payload: bytes | memoryview) -> bytes | bytearray:
        """Raises CpuSpent when the limit ends the process, an EOFError or OSError when it dies otherwise."""
        try:
            return await self._exchange(*payload)
        except (EOFError, OSError):
            if await self._ended() == -signal.SIGPROF:
                raise CpuSpent("reading the request took more CPU time than this server allows") from None
            raise

    async def _exchange(self, *payload: bytes | memoryview) -> bytes | bytearray:
        await self._send(*payload)
        (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if size <= PIECE:
            return await self._reader.readexactly(size)
        answer = bytearray(size)  # filled in pieces: one copy of all of it would hold the event loop up
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
        """Ends the process, at once."""
        self._writer.close()
        self._process.kill()
        # A killed process is gone within milliseconds; there is no need to wait until it is reaped.
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)
