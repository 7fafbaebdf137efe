"""The front's side of the link to a head: one zmq DEALER, used by the tasks of this class only.

Submits and Finishes leave through one queue, in order, so that a Finish can't overtake its Submit. Events
that come for a sequence nobody waits for any more (its client left, its text side ended it) are dropped
and counted. When the head dies, every open flow fails at once, exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from weft.common.clock import Clock, SystemClock
from weft.common.errors import EngineDead, ErrorInfo, Overloaded, Unavailable, WeftError
from weft.common.log import get_logger
from weft.front.flow import Flow, Observer
from weft.front.progress import Progress
from weft.types import messages as m

log = get_logger(__name__)

START_TIMEOUT = 3600.0
"""Seconds a living head process may take to load its model."""
POLL = 0.2
"""Seconds between two looks at the head's process and its progress."""
HIGH_WATER = 10_000
"""Messages zmq may hold in each direction."""
OUTBOX_LIMIT = 20_000
"""Messages that may wait here for zmq; a Submit beyond it is refused."""


class Process(Protocol):
    """What is needed of the head's ``subprocess.Popen``."""

    def poll(self) -> int | None: ...


class HeadClient:
    """Owns the link and the flows of all live requests."""

    def __init__(
        self, endpoint: str, process: Process, engine_timeout: float, clock: Clock | None = None
    ) -> None:
        self._endpoint = endpoint
        self._process = process
        self._timeout = engine_timeout
        self._clock = clock or SystemClock()
        self._progress = Progress(engine_timeout, self._clock.now())
        self._flows: dict[int, Flow] = {}
        self._outbox: deque[m.ToHead] = deque()
        self._out = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._welcomed = asyncio.Event()
        self._closing = False
        self._context: zmq.asyncio.Context | None = None
        self.welcome: m.Welcome | None = None
        self.failure: WeftError | None = None
        self.died = asyncio.Event()
        self.stats = m.HeadStats()
        self.bad_frames = 0
        self.late_events = 0

    # -- life ---------------------------------------------------------------------------------------

    async def start(self) -> m.Welcome:
        """Connects and says Hello; returns when the head answers. Raises WeftError when it never will."""
        self._context = context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME)
        socket.connect(self._endpoint)
        self._send(m.Hello(versions=(m.VERSION, m.VERSION), front=secrets.token_hex(8)))
        for work in (self._receive(socket), self._transmit(socket), self._watch()):
            self._tasks.append(asyncio.create_task(self._guard(work)))
        ended = [asyncio.create_task(e.wait()) for e in (self._welcomed, self.died)]
        try:
            await asyncio.wait(ended, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ended:
                task.cancel()
        if self.failure is not None:
            raise self.failure
        if self.welcome is None:
            self._die(EngineDead("the engine did not start in time"))
            raise EngineDead("the engine did not start in time")
        return self.welcome

    async def close(self) -> None:
        """Tells the head to stop, fails what is still open, closes the socket. The link is over."""
        self._closing = True
        if self.failure is None and self._tasks:
            self._send(m.Shutdown())
            deadline = self._clock.now() + 1.0
            while self._outbox and self._clock.now() < deadline:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
        self.fail_all(Unavailable("the server is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=500)

    @property
    def alive(self) -> bool:
        """Whether the head answered Hello and did not fail since."""
        return self.welcome is not None and self.failure is None

    def progressing(self, window: float) -> bool:
        """Whether the head proved progress in the last ``window`` seconds."""
        return self.alive and self._progress.recent(self._clock.now(), window)

    # -- work ---------------------------------------------------------------------------------------

    def submit(self, submits: Iterable[m.Submit], observe: Observer | None = None) -> Flow:
        """Sends one request's sequences and opens their flow. Raises WeftError; then nothing was sent."""
        if self.failure is not None:
            raise Unavailable("the engine has failed; the server is stopping")
        if self.welcome is None or self._closing:
            raise Unavailable("the engine is not ready yet")
        if len(self._outbox) >= OUTBOX_LIMIT:
            raise Overloaded("too many requests wait for the engine")
        made = list(submits)
        flow = Flow([s.sequence for s in made], observe)
        for submit in made:
            self._flows[submit.sequence] = flow
            self._send(submit)
        return flow

    def finish(self, flow: Flow, sequence: int) -> None:
        """Ends one sequence of a flow, if it is open: the head is told, later events of it are dropped."""
        if sequence in flow.open:
            del flow.open[sequence]
            self._flows.pop(sequence, None)
            if self.failure is None:
                self._send(m.Finish(sequence=sequence))

    def release(self, flow: Flow) -> None:
        """Ends whatever of the flow is still open. Idempotent; every handler calls it, however it ended."""
        for sequence in list(flow.open):
            self.finish(flow, sequence)

    def fail_all(self, error: WeftError) -> None:
        """Fails every open flow with ``error``."""
        flows = list({id(flow): flow for flow in self._flows.values()}.values())
        for flow in flows:
            flow.fail(error)

    @property
    def open_sequences(self) -> int:
        return len(self._flows)

    # -- the link -----------------------------------------------------------------------------------

    def _send(self, message: m.ToHead) -> None:
        self._outbox.append(message)
        self._out.set()

    async def _transmit(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await self._out.wait()
            self._out.clear()
            while self._outbox:
                message = self._outbox.popleft()
                try:
                    frame = m.encode(message)
                except WeftError as error:
                    self._refuse(message, error)
                else:
                    await socket.send(frame)

    def _refuse(self, message: m.ToHead, error: WeftError) -> None:
        """A Submit that can't be sent fails its request."""
        if isinstance(message, m.Submit) and (flow := self._flows.get(message.sequence)) is not None:
            flow.fail(error)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                (frame,) = frames
                message = m.decode_to_front(frame)
            except (ValueError, msgspec.MsgspecError):
                self.bad_frames += 1
                continue
            self._take(message)

    def _take(self, message: m.ToFront) -> None:
        now = self._clock.now()
        if isinstance(message, m.Tokens):
            self._progress.frame(now)
            for event in message.events:
                self._dispatch(event)
        elif isinstance(message, m.Heartbeat):
            self._progress.beat(message.idle, message.stats.steps, now)
            self.stats = message.stats
        elif isinstance(message, m.Welcome):
            self._greet(message)
        else:
            log.error("the engine failed: %s", message.error.message)
            self._die(HeadError(message.error))

    def _greet(self, welcome: m.Welcome) -> None:
        low, high = welcome.versions
        if not low <= m.VERSION <= high:
            self._die(EngineDead(f"the engine speaks versions {low} to {high}, this front {m.VERSION}"))
            return
        if self.welcome is not None and self.welcome.incarnation != welcome.incarnation:
            self._die(EngineDead("the engine was replaced"))
            return
        self._progress = Progress(self._timeout, self._clock.now())
        self.welcome = welcome
        self._welcomed.set()

    def _dispatch(self, event: m.TokenEvent) -> None:
        flow = self._flows.get(event.sequence)
        if flow is None:
            self.late_events += 1
            return
        if event.finish is not None:
            del self._flows[event.sequence]
            flow.open.pop(event.sequence, None)
        flow.push(event)

    async def _watch(self) -> None:
        """Ends the link when the head's process has ended or shows no progress."""
        while True:
            await asyncio.sleep(POLL)
            status = self._process.poll()
            if status is not None and not self._closing:
                log.error("the engine's process ended with status %s", status)
                self._die(EngineDead("the engine's process ended"))
            elif self.alive and (reason := self._progress.overdue(self._clock.now())) is not None:
                log.error("%s", reason)
                self._die(EngineDead(reason))

    def _die(self, error: WeftError) -> None:
        if self.failure is None and not self._closing:
            self.failure = error
            self._outbox.clear()
            self.fail_all(error)
            self._flows.clear()
            self.died.set()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one of the link's tasks. A task that fails takes the link down, never silently."""
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except Exception as error:
                log.exception("the link to the engine failed")
                self._die(EngineDead(f"the link to the engine failed ({type(error).__name__})"))


class HeadError(WeftError):
    """An error that a head reported, with the head's own code, blame and status."""

    def __init__(self, reported: ErrorInfo) -> None:
        super().__init__(reported.message, param=reported.param, code=reported.code)
        self._reported = reported

    def info(self) -> ErrorInfo:
        return self._reported
