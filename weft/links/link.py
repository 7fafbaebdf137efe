"""One connection to the process of an instance: a zmq DEALER, and what is known of that process.

Messages leave through one queue, in order, so a Finish can't overtake its Submit. The link reports events of
``weft.routing.events`` to its owner, and decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.common.shared_bytes import UNREACHABLE, reaches
from weft.parallel.secret import CurveKeys
from weft.routing import events as e
from weft.types import messages as m
from weft.types.attachments import encode_parts

log = get_logger(__name__)

POLL = 0.2
"""Seconds between two checks of processes."""
STATUS_S = 1.0
"""Seconds that a process gets to end after its connection broke: its exit status says more."""
HIGH_WATER = 10_000
"""Messages zmq may hold in each direction."""
SENT_AT_ONCE = 256 << 10
"""Bytes that are sent before the event loop's other tasks get their turn."""
MESSAGE_COST = 4 << 10
"""Bytes whose sending takes as long as a message's own handling."""
FLUSH_S = 1.0
"""Seconds in which waiting messages are still sent when the link is closed."""


class Process(Protocol):
    """The part of ``subprocess.Popen`` that a link needs."""

    def poll(self) -> int | None: ...


Endpoint: TypeAlias = str | Callable[[], str | None]
"""Where a head listens; a function where that is known only after the head has started."""


class Address(NamedTuple):
    """Where a head is: the socket that it listens at, its process and, on another host, the keys to it."""

    endpoint: Endpoint
    process: Process
    keys: CurveKeys | None = None
    incarnation: int = 0
    """Number of the instance's process, to tell it from earlier ones."""
    draining: bool = False
    """Whether it should get no new sequences."""
    domain: str = ""
    """Heads of one domain work together or not at all; "" is none."""


class Link:
    """``number`` tells the links of one instance apart. Used from one event loop."""

    def __init__(
        self,
        instance: str,
        number: int,
        address: Address,
        context: zmq.asyncio.Context,
        timeout: float,
        report: Callable[[e.Event], None],
    ) -> None:
        """``timeout``: seconds after which a process that does not even answer pings counts as gone."""
        self.instance = instance
        self.number = number
        self.process = address.process
        self.incarnation = address.incarnation
        self.began = 0.0
        """When the link was made, by its owner's clock."""
        self.bad_frames = 0
        self.heartbeats = 0
        self._address = address
        self._context = context
        self._timeout = timeout
        self._report = report
        self._outbox: deque[m.ToHead] = deque()
        self._out = asyncio.Event()
        self._broken_at: float | None = None
        self._by_name = False
        """Whether the head can open memory of this process."""
        self._over = False
        """Whether the loss of the process was reported, or need not be."""
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks = [asyncio.create_task(self._guard(self._connect()))]

    @property
    def waiting(self) -> int:
        """Messages that wait to be sent."""
        return len(self._outbox)

    def send(self, message: m.ToHead) -> None:
        """Queues a message. Never waits."""
        self._outbox.append(message)
        self._out.set()

    def look(self, now: float) -> None:
        """Reports the process as lost if it has ended, or its connection has been broken for too long."""
        if self._over:
            return
        status = self.process.poll()
        if status is not None:
            log.error("the engine's process ended with status %s", status)
            self._lose(EngineDead("the engine's process ended"))
        elif self._broken_at is not None and now - self._broken_at >= STATUS_S:
            self._lose(EngineDead("the engine's process does not answer"))

    async def close(self, flush: bool) -> None:
        """Ends the link; ``flush``: waiting messages are sent first, for at most ``FLUSH_S`` seconds.

        Idempotent.
        """
        self._over = True
        if flush and self._socket is not None:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + FLUSH_S
            while self._outbox and loop.time() < deadline:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
        self._outbox.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None and self._monitor is not None and not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=500 if flush else 0)

    async def _connect(self) -> None:
        """Connects when the head is there."""
        endpoint = self._address.endpoint
        while (place := endpoint if isinstance(endpoint, str) else endpoint()) is None:
            await asyncio.sleep(POLL)
        self._socket = socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME)
        # Answered by a thread of zmq itself, however busy the head is: no answer, no process.
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(int(self._timeout * 200), 1))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(int(self._timeout * 800), 1))
        if self._address.keys is not None:
            self._address.keys.guard_rank(socket)
        self._monitor = monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        socket.connect(place)
        self._report(e.Located(self.instance, self.number))
        for work in (self._receive(socket), self._transmit(socket), self._watch(monitor)):
            self._tasks.append(asyncio.create_task(self._guard(work)))

    async def _transmit(self, socket: zmq.asyncio.Socket) -> None:
        sent = 0
        while True:
            await self._out.wait()
            self._out.clear()
            while self._outbox:
                message = self._outbox[0]
                try:
                    frames = encode_parts(message, self._by_name)
                except WeftError as error:
                    self._outbox.popleft()
                    self._refuse(message, error)
                    continue
                if len(frames) == 1:
                    await socket.send(frames[0])
                else:  # pixels are not copied: they stay as they are until they are sent
                    await socket.send_multipart(frames, copy=False)
                self._outbox.popleft()
                sent += len(frames[0]) + len(frames) * MESSAGE_COST
                if sent > SENT_AT_ONCE:  # a send that need not wait does not let others run
                    sent = 0
                    await asyncio.sleep(0)

    def _refuse(self, message: m.ToHead, error: WeftError) -> None:
        """A Submit that can't be sent is answered as a head would."""
        if isinstance(message, m.Submit):
            end = m.TokenEvent(
                sequence=message.sequence, attempt=message.attempt, finish="error", error=error.info()
            )
            self._tell(m.Tokens(step=-1, events=(end,)))

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                (frame,) = frames
                message = m.decode_to_front(frame)
            except (ValueError, msgspec.MsgspecError):
                self.bad_frames += 1
                continue
            self.heartbeats += isinstance(message, m.Heartbeat)
            if isinstance(message, m.Welcome):
                self._by_name = message.probe is not None and reaches(message.probe)
            elif self._by_name and isinstance(message, m.Tokens) and any(map(_unreached, message.events)):
                log.warning("%s cannot open images of this process: they are sent from now on", self.instance)
                self._by_name = False
            self._tell(message)

    def _tell(self, message: m.ToFront) -> None:
        self._report(e.Received(self.instance, self.number, message))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._report(e.Linked(self.instance, self.number))
            elif self._broken_at is None:
                self._broken_at = asyncio.get_running_loop().time()

    def _lose(self, error: WeftError) -> None:
        if not self._over:
            self._over = True
            self._report(e.Lost(self.instance, self.number, error))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one of the link's tasks. A task that fails takes the link down, never silently."""
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except Exception as error:
                log.exception("the link to the engine failed")
                self._lose(EngineDead(f"the link to the engine failed ({type(error).__name__})"))


def _unreached(event: m.TokenEvent) -> bool:
    return event.error is not None and event.error.code == UNREACHABLE
