"""The front's side of the link to a head: one zmq DEALER, used by the tasks of this class only.

Submits and Finishes leave through one queue, in order, so that a Finish can't overtake its Submit. Events
that come for a sequence nobody waits for any more (its client left, its text side ended it) are dropped
and counted. A sequence that was taken back may be submitted again at once: a head answers every Submit with
one end, so what comes before that is of the earlier one. When the head dies, every open flow fails at once,
exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeAlias

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from weft.common.clock import Clock, SystemClock
from weft.common.errors import EngineDead, Overloaded, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.front.flow import Flow, Observer
from weft.front.progress import Progress
from weft.parallel.secret import Keys
from weft.types import messages as m

log = get_logger(__name__)

START_TIMEOUT = 3600.0
"""Seconds a living head process may take to load its model."""
LISTEN_TIMEOUT = 60.0
"""Seconds it may take to listen, which it does first of all. From then on it answers pings."""
POLL = 0.2
"""Seconds between two looks at the head's process and its progress."""
HIGH_WATER = 10_000
"""Messages zmq may hold in each direction."""
OUTBOX_LIMIT = 20_000
"""Messages that may wait here for zmq; a Submit beyond it is refused."""
SENT_AT_ONCE = 256 << 10
"""Bytes that are sent before the event loop's other tasks get their turn."""
MESSAGE_COST = 4 << 10
"""Bytes whose sending takes as long as a message's own handling."""


class Process(Protocol):
    """What is needed of the head's ``subprocess.Popen``."""

    def poll(self) -> int | None: ...


Whence: TypeAlias = str | Callable[[], str | None]
"""Where a head listens; a function, where that is known only when it has started."""
Abandon: TypeAlias = Callable[[dict[int, Flow], WeftError], None]
"""Takes over the open sequences of a dead head, with what it died of. Called once."""


class HeadClient:
    """Owns the link, and the flows of the sequences that its head works on."""

    def __init__(
        self,
        endpoint: Whence,
        process: Process,
        engine_timeout: float,
        clock: Clock | None = None,
        link_timeout: float = 10.0,
        abandon: Abandon | None = None,
        keys: Keys | None = None,
    ) -> None:
        """``link_timeout``: seconds after which a process that does not even answer pings counts as dead.
        Without ``abandon`` open flows fail when the head dies. ``keys``: to a head on another host.
        """
        self._endpoint = endpoint
        self._keys = keys
        self._process = process
        self._timeout = engine_timeout
        self._link_timeout = link_timeout
        self._abandon = abandon
        self._clock = clock or SystemClock()
        self._progress = Progress(engine_timeout, self._clock.now())
        self._flows: dict[int, Flow] = {}
        self._ending: dict[int, int] = {}
        """Sequences that were taken back, and how many ends of them are still to come."""
        self._outbox: deque[m.ToHead] = deque()
        self._out = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._welcomed = asyncio.Event()
        self._closing = False
        self._linked = False
        """Whether there was a connection."""
        self._listen_by = math.inf
        """When there must have been one."""
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
        self._tasks.append(asyncio.create_task(self._guard(self._watch())))
        self._tasks.append(asyncio.create_task(self._guard(self._link())))
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
        if self.failure is None and self._context is not None:
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
            # A head that has not answered yet is still loading, and its process is ended by whoever owns it.
            self._context.destroy(linger=500 if self.welcome is not None else 0)

    @property
    def alive(self) -> bool:
        """Whether the head answered Hello and did not fail since."""
        return self.welcome is not None and self.failure is None

    def progressing(self, window: float) -> bool:
        """Whether the head proved progress in the last ``window`` seconds."""
        return self.alive and self._progress.recent(self._clock.now(), window)

    # -- work ---------------------------------------------------------------------------------------

    def submit(
        self, submits: Iterable[m.Submit], observe: Observer | None = None, flow: Flow | None = None
    ) -> Flow:
        """Sends sequences of one request and opens their flow. Raises WeftError; then nothing was sent.

        ``flow``: one that is there already, and knows them.
        """
        if self.failure is not None:
            raise Unavailable("the engine has failed; the server is stopping")
        if self.welcome is None or self._closing:
            raise Unavailable("the engine is not ready yet")
        if len(self._outbox) >= OUTBOX_LIMIT:
            raise Overloaded("too many requests wait for the engine")
        made = list(submits)
        if flow is None:
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

    def take_back(self, sequence: int) -> None:
        """Ends an open sequence here, which may be submitted again. Its flow keeps it."""
        if self._flows.pop(sequence, None) is not None and self.failure is None:
            self._ending[sequence] = self._ending.get(sequence, 0) + 1
            self._send(m.Finish(sequence=sequence))

    def release(self, flow: Flow) -> None:
        """Ends whatever of the flow is still open. Idempotent; every handler calls it, however it ended."""
        for sequence in list(flow.open):
            self.finish(flow, sequence)

    def fail_all(self, error: WeftError) -> None:
        """Fails every open flow with ``error``."""
        fail_flows(self._flows.values(), error)

    @property
    def open_sequences(self) -> int:
        return len(self._flows)

    # -- the link -----------------------------------------------------------------------------------

    async def _link(self) -> None:
        """Connects when the head is there, says Hello, and carries what is said."""
        while (endpoint := self._endpoint if isinstance(self._endpoint, str) else self._endpoint()) is None:
            await asyncio.sleep(POLL)  # ``start`` and ``_watch`` end this
        self._context = context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME)
        # Answered by a thread of zmq itself, however busy the head is: no answer, no process.
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(int(self._link_timeout * 200), 1))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(int(self._link_timeout * 800), 1))
        if self._keys is not None:
            self._keys.guard_rank(socket)
        ends = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)
        self._listen_by = self._clock.now() + LISTEN_TIMEOUT
        self._send(m.Hello(versions=(m.VERSION, m.VERSION), front=secrets.token_hex(8)))
        for work in (self._receive(socket), self._transmit(socket), self._await_end(ends)):
            self._tasks.append(asyncio.create_task(self._guard(work)))

    def _send(self, message: m.ToHead) -> None:
        self._outbox.append(message)
        self._out.set()

    async def _transmit(self, socket: zmq.asyncio.Socket) -> None:
        sent = 0
        while True:
            await self._out.wait()
            self._out.clear()
            while self._outbox:
                message = self._outbox.popleft()
                try:
                    frame = m.encode(message)
                except WeftError as error:
                    self._refuse(message, error)
                    continue
                await socket.send(frame)
                sent += len(frame) + MESSAGE_COST
                if sent > SENT_AT_ONCE:  # a send that need not wait does not let others run
                    sent = 0
                    await asyncio.sleep(0)

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
            self._die(ReportedError(message.error))

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
        if event.sequence in self._ending:
            flow = None
            if event.finish is not None:
                self._ending[event.sequence] -= 1
                if not self._ending[event.sequence]:
                    del self._ending[event.sequence]
        if flow is None:
            self.late_events += 1
            return
        if event.finish is not None:
            del self._flows[event.sequence]
            flow.open.pop(event.sequence, None)
        flow.push(event)

    async def _watch(self) -> None:
        """Ends the link when the head's process has ended, does not even listen, or shows no progress."""
        while self.failure is None:
            await asyncio.sleep(POLL)
            status = self._process.poll()
            if status is not None and not self._closing:
                log.error("the engine's process ended with status %s", status)
                self._die(EngineDead("the engine's process ended"))
            elif not self._linked and self._clock.now() > self._listen_by:
                log.error("the engine's process does not listen")
                self._die(EngineDead("the engine's process does not listen"))
            elif self.alive and (reason := self._progress.overdue(self._clock.now())) is not None:
                log.error("%s", reason)
                self._die(EngineDead(reason))

    async def _await_end(self, ends: zmq.asyncio.Socket) -> None:
        """Ends the link when its connection breaks: the head's process is gone, or does not run."""
        while True:
            event = parse_monitor_message(await ends.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._linked = True
                continue
            for _ in range(10):  # one that ends is told by its status, which says more
                if self.failure is not None or self._process.poll() is not None:
                    return
                await asyncio.sleep(POLL / 2)
            if not self._closing:
                log.error("the engine's process does not answer")
                self._die(EngineDead("the engine's process does not answer"))

    def end(self, error: WeftError) -> None:
        """Takes the head for dead, if it is not."""
        self._die(error)

    def _die(self, error: WeftError) -> None:
        if self.failure is None and not self._closing:
            self.failure = error
            self._outbox.clear()
            flows, self._flows = self._flows, {}
            if self._abandon is not None:
                self._abandon(flows, error)
            else:
                fail_flows(flows.values(), error)
            self.died.set()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one of the link's tasks. A task that fails takes the link down, never silently."""
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except Exception as error:
                log.exception("the link to the engine failed")
                self._die(EngineDead(f"the link to the engine failed ({type(error).__name__})"))


def fail_flows(flows: Iterable[Flow], error: WeftError) -> None:
    """Fails each of ``flows`` once with ``error``."""
    for flow in list({id(flow): flow for flow in flows}.values()):
        flow.fail(error)
