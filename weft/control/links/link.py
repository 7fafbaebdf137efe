"""The link to the process of an instance: one zmq DEALER after another, and the state of the process.

    connecting ──handshake: Linked──► up ──broken──► connecting, with another socket
                                                       │ 1 s: Unreachable
                                                       ▼ the process ended, or patience is over: Lost

Messages leave through one queue, in order, so a Finish cannot overtake a Submit. The link reports events of
``weft.control.fleet.fleet_events`` to the owner and decides nothing.

A broken connection loses messages of both directions, and nobody knows which. So each connection has a
separate socket: no message queued for the old connection reaches the engine process before the new Hello.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.common.shared_bytes import UNREACHABLE, reaches
from weft.control.fleet import fleet_events as e
from weft.control.links.channel import Channel
from weft.parallel.secret import CurveKeys
from weft.types import messages as m
from weft.types.handshake import EngineIdentity
from weft.types.messages import encode_parts

log = get_logger(__name__)

POLL = 0.2
"""Seconds between two checks of processes."""
STATUS_S = 1.0
"""Seconds for a process to end after the connection broke. An exit status explains more than a broken
connection.
"""
CONNECT_MS = 1000
"""Milliseconds after which an unanswered connection attempt is repeated."""
HIGH_WATER = 10_000
"""Maximum messages in zmq's queue, for each direction."""
SENT_AT_ONCE = 256 << 10
"""Bytes sent before other tasks of the event loop run."""
MESSAGE_COST = 4 << 10
"""Fixed cost of a message, as a number of bytes with the same sending time."""
FLUSH_S = 1.0
"""Maximum seconds to send queued messages when the link is closed."""


class Process(Protocol):
    """The interface of ``subprocess.Popen`` for a link."""

    def poll(self) -> int | None: ...


class ProcessElsewhere:
    """Stand-in for a process of another owner. The owner, or the link itself, finds the end."""

    def poll(self) -> int | None:
        """Return None: the process counts as running."""
        return None


Endpoint: TypeAlias = str | Callable[[], str | None]
"""Address of an engine process, or a function where the address is known only after the engine has started.
The function returns None before.
"""


class Address(NamedTuple):
    """The location of an engine process: socket address, process and, on another host, keys."""

    endpoint: Endpoint
    process: Process
    keys: CurveKeys | None = None
    incarnation: int = 0
    """Number of the instance's process start. Distinguishes the process from earlier processes."""
    draining: bool = False
    """True if the engine process must not receive new sequences."""
    expert_group: str = ""
    """Expert-parallel group of the engine process: the engines of one group work together or not at all. ""
    for no group.
    """
    leaving: bool = False
    """True if the engine process drains and ends, and no other process of the name will be started."""
    identity: EngineIdentity | None = None
    """Identity of the engine process, if the process can tell its identity."""


class Link:
    """The link to one process of an instance. ``number`` distinguishes the links of one instance. Used from
    one event loop.
    """

    def __init__(
        self,
        instance: str,
        number: int,
        address: Address,
        context: zmq.asyncio.Context,
        timeout: float,
        report: Callable[[e.Event], None],
    ) -> None:
        """Start to connect, in a task. Call inside a running event loop.

        ``context`` is shared and not closed. ``timeout``: seconds without an answer to pings after which the
        process counts as gone. ``report`` receives events of the process, from the event loop.
        """
        self.instance = instance
        self.number = number
        self.process = address.process
        self.incarnation = address.incarnation
        self.bad_frames = 0
        self.heartbeats = 0
        self._address = address
        self._context = context
        self._timeout = timeout
        self._report = report
        self._outbox: deque[m.ToEngine] = deque()
        self._out = asyncio.Event()
        self._linked = False
        """True after the first handshake."""
        self._broken_at: float | None = None
        """Time at which the connection broke, or of the first failed attempt; None while connected or not
        tried.
        """
        self._heard = 0.0
        """Time of the last message, or of the last handshake."""
        self._until = 0.0
        """Time until which a broken connection is retried at least. All times are times of the event loop."""
        self._unreachable = False
        """True after ``Unreachable`` was reported, until the next handshake."""
        self._by_name = False
        """True if the engine process can open shared memory of the local process."""
        self._over = False
        """True after the loss of the process was reported, or after ``close``."""
        self._socket: zmq.Socket[bytes] | None = None
        self._channel: Channel | None = None
        """Receives from the socket while the connection is up."""
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks = [asyncio.create_task(self._guard(self._connect()))]

    @property
    def waiting(self) -> int:
        """Number of queued messages."""
        return len(self._outbox)

    @property
    def behind(self) -> bool:
        """True while the event loop is slower than the engine process sends."""
        return self._channel is not None and self._channel.behind

    def send(self, message: m.ToEngine) -> None:
        """Queue a message. Does not block."""
        self._outbox.append(message)
        self._out.set()

    def look(self, now: float) -> None:
        """Report the process as lost if the process has ended or the connection has been broken for too long.

        Report ``Unreachable`` once while a broken connection is retried.
        """
        if self._over:
            return
        status = self.process.poll()
        if status is not None:
            self._lose(EngineDead(f"the engine's process ended with status {status}"))
        elif not self._linked or self._broken_at is None or now - self._broken_at < STATUS_S:
            return  # before the first handshake the engine process is loading; the fleet bounds the load
        elif now >= self._until:
            self._lose(EngineDead("the engine's process does not answer"))
        elif not self._unreachable:
            self._unreachable = True
            self._report(e.Unreachable(self.instance, self.number))

    def excuse(self, now: float) -> None:
        """Extend the patience with a broken connection, because the local process was stalled meanwhile."""
        self._until = now + self._timeout

    async def close(self, flush: bool) -> None:
        """Close the link. With ``flush``, first send queued messages for at most ``FLUSH_S`` seconds.
        Idempotent.
        """
        self._over = True
        if flush and self._linked and self._broken_at is None:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + FLUSH_S
            while self._outbox and loop.time() < deadline:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
        self._outbox.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_socket(linger=500 if flush else 0)

    def _close_socket(self, linger: int) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._socket is not None and self._monitor is not None and not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger)

    async def _connect(self) -> None:
        """Connect when the engine process is there, and again whenever the connection breaks. Runs until
        cancelled.
        """
        endpoint = self._address.endpoint
        while (place := endpoint if isinstance(endpoint, str) else endpoint()) is None:
            await asyncio.sleep(POLL)
        self._report(e.Located(self.instance, self.number))
        # On one host a connection breaks only when an end is gone. A network can break a connection at any
        # time.
        patience = self._timeout if place.startswith("tcp:") else 0.0
        while True:
            socket, monitor = self._make_socket(place)
            await self._until_linked(monitor)
            self._channel = channel = Channel(socket, self._take)
            work = asyncio.create_task(self._guard(self._transmit(channel)))
            self._tasks.append(work)
            await self._until_broken(monitor)
            work.cancel()
            self._tasks.remove(work)
            await asyncio.gather(work, return_exceptions=True)
            channel.close()
            self._take_rest(socket)
            # An engine process in a long step sends nothing but answers pings, so always leave some patience.
            self._until = max(self._until, self._heard + patience, (self._broken_at or 0.0) + 0.3 * patience)
            self._close_socket(linger=0)

    def _make_socket(self, place: str) -> tuple[zmq.Socket[bytes], zmq.asyncio.Socket]:
        """Return (socket that connects to ``place``, its monitor socket). ``_close_socket`` closes both."""
        self._socket = socket = zmq.Socket(self._context, zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME)
        # zmq's own thread answers pings, even while the engine process is busy. So no answer means no
        # process.
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(int(self._timeout * 200), 1))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(int(self._timeout * 800), 1))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        # Only from the second connection on: a loading engine process answers the first handshake late.
        if self._linked:
            socket.setsockopt(zmq.HANDSHAKE_IVL, max(int(self._timeout * 300), CONNECT_MS))
        if self._address.keys is not None:
            self._address.keys.guard_rank(socket)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        # The context makes the monitor, so the monitor is asynchronous.
        self._monitor = monitor = cast(zmq.asyncio.Socket, socket.get_monitor_socket(events))
        socket.connect(place)
        return socket, monitor

    async def _transmit(self, channel: Channel) -> None:
        """Send queued messages in order, until cancelled.

        A message that cannot be encoded is answered by ``_refuse``.
        """
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
                await channel.send(frames)
                # Pop after sending: `waiting` counts the message until zmq has accepted the message.
                self._outbox.popleft()
                sent += len(frames[0]) + len(frames) * MESSAGE_COST
                if sent > SENT_AT_ONCE:  # `send` may complete without yielding to other tasks
                    sent = 0
                    await asyncio.sleep(0)

    def _refuse(self, message: m.ToEngine, error: WeftError) -> None:
        """Answer an unsendable Submit with an error event, as an engine process would."""
        if isinstance(message, m.Submit):
            end = m.TokenEvent(
                sequence=message.sequence, attempt=message.attempt, finish="error", error=error.info()
            )
            self._tell(m.Tokens(step=-1, events=(end,)))

    def _take_rest(self, socket: zmq.Socket[bytes]) -> None:
        """Handle messages received before the connection broke: the last message may contain the reason."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(socket.recv_multipart(zmq.NOBLOCK))

    def _take(self, frames: list[bytes]) -> None:
        """Handle a message. An error is logged and reported as a loss, as in ``_guard``."""
        try:
            self._decode(frames)
        except Exception as error:
            self._fail(error)

    def _decode(self, frames: list[bytes]) -> None:
        """Decode and report a message of the engine process.

        An invalid message is counted in ``bad_frames``. Decides whether pixels go by name from now on.
        """
        try:
            (frame,) = frames
            message = m.decode_to_front(frame)
        except (ValueError, msgspec.MsgspecError):
            self.bad_frames += 1
            return
        self._heard = asyncio.get_running_loop().time()
        self.heartbeats += isinstance(message, m.Heartbeat)
        if isinstance(message, m.Welcome):
            self._by_name = message.probe is not None and reaches(message.probe)
        elif self._by_name and isinstance(message, m.Tokens) and any(map(_unreached, message.events)):
            log.warning(
                "%s cannot map shared image memory: images are sent as bytes from now on", self.instance
            )
            self._by_name = False
        self._tell(message)

    def _tell(self, message: m.ToFront) -> None:
        self._report(e.Received(self.instance, self.number, message))

    async def _until_linked(self, monitor: zmq.asyncio.Socket) -> None:
        """Wait for the handshake and report ``Linked``. At a reconnection, drop all queued messages."""
        loop = asyncio.get_running_loop()
        while await _event(monitor) != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._broken_at is None:
                self._broken_at = loop.time()
        if self._linked:  # queued messages were for the broken connection
            self._outbox.clear()
            log.warning("reconnected to engine %s", self.instance)
        self._linked, self._broken_at, self._unreachable = True, None, False
        self._heard = loop.time()
        self._report(e.Linked(self.instance, self.number))

    async def _until_broken(self, monitor: zmq.asyncio.Socket) -> None:
        while await _event(monitor) != zmq.EVENT_DISCONNECTED:
            pass
        self._broken_at = asyncio.get_running_loop().time()

    def _lose(self, error: WeftError) -> None:
        if not self._over:
            self._over = True
            self._report(e.Lost(self.instance, self.number, error))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run one task of the link. A failed task is logged and reported as a loss, never silent."""
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        log.error("the link to the engine failed", exc_info=error)
        self._lose(EngineDead(f"the link to the engine failed ({type(error).__name__})"))


async def _event(monitor: zmq.asyncio.Socket) -> int:
    """Return the next event of a socket: a constant ``zmq.EVENT_*``."""
    return int(parse_monitor_message(await monitor.recv_multipart())["event"])


def _unreached(event: m.TokenEvent) -> bool:
    return event.error is not None and event.error.code == UNREACHABLE
