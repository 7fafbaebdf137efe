"""The front as a process: from a bound port over a ready line to an exit status."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

import uvicorn
import uvloop

from weft.common import log as weft_log
from weft.common import signals
from weft.common.allocator import keep_heap_small
from weft.common.errors import ConfigError, Unavailable, WeftError
from weft.common.open_files import allow_files
from weft.config.resolved import EngineConfig
from weft.config.sections import FrontSection
from weft.front import first_request
from weft.front.app import build_app
from weft.front.connection import Connection
from weft.front.connections import Connections, most_connections
from weft.front.context import Front
from weft.front.generation import probe
from weft.front.hosts import Hosts
from weft.front.lifecycle import Phase
from weft.front.middleware import AccessGate
from weft.front.siblings import Siblings
from weft.links.owner import Owner

log = weft_log.get_logger(__name__)

GRACE = 2
"""Seconds that connections get to take their last bytes when the server stops."""
SWITCH_INTERVAL = 0.0005
"""Seconds for which a text thread may keep the event loop from running Python."""
BACKLOG = 512
"""Connections that the kernel keeps until they are accepted. As many may be taken at once, 0.1 ms each."""
SEND_BUFFER = 64 << 10
"""Bytes that the kernel takes of a connection's answers before its client has them. Its own choice grows to
megabytes, which hide that a client does not read."""
FORCED = 130
"""Exit status when a second signal cut requests off."""


class FrontSupervisor(Protocol):
    """The process that runs this front, and owns the heads."""

    serving: bool
    """Whether other fronts answer requests already: then this one takes no connection before it can."""

    def attach(self, drain: Callable[[], None], stop: Callable[[], None]) -> None:
        """Has the one called when this front is told to drain, and the other when it is told to stop now.

        On the running event loop.
        """

    def ready(self) -> None:
        """Hears that this front answers requests."""

    def drain(self) -> None:
        """Drains and ends the whole server."""


def serve(
    config: EngineConfig,
    front: FrontSection,
    owner: Owner,
    supervisor: FrontSupervisor | None = None,
    siblings: Siblings | None = None,
) -> int:
    """Serves until a signal (0, after draining), a second one (130) or the death of the last head (1).

    A signal that comes before the server is ready ends it at once, with status 128 and the signal's number.

    ``owner`` owns the heads. Without ``supervisor`` they are this server's: they have been told to stop, or
    are dead, when this returns. With it they are shared with other fronts and live on; signals are ignored,
    and the port is shared. Call from the main thread: it takes ``signals.STOPS``, and leaves them ignored,
    since what follows is the process's end. Raises ConfigError when the port or the tokenizer can't be used.
    """
    caught: list[int] = []
    if supervisor is None:  # whatever a handler raises while the event loop begins leaves it half begun
        for number in signals.heeded():
            signal.signal(number, lambda number, _: caught.append(number))
    at_once = supervisor is None or not supervisor.serving
    listener = bind(front.host, front.port, shared=supervisor is not None, listens=at_once)
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_heap_small()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(FrontServer(config, front, owner, listener, supervisor, siblings).run(caught))


def bind(host: str, port: int, *, shared: bool = False, listens: bool = True) -> socket.socket:
    """A socket at the address, which listens unless it only reserves it. Raises ConfigError naming the flags.

    ``shared``: beside other sockets of this server.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address[:2])
            if listens:
                listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        # Python words some of these errors itself, with the address in them; the system's words are plain.
        number = error.errno or 0
        system = os.strerror(number) if number > 0 else error.strerror
        reason = (system or "unknown reason").lower()
        raise ConfigError(
            f"can't listen on port {port} ({reason}); change --host or --port", param="port"
        ) from None


class _Uvicorn(uvicorn.Server):
    """uvicorn, with signals left to ``FrontServer``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(Connection):
    """Has the gate count what never became a request."""

    def _refuse(self, error: WeftError) -> None:
        super()._refuse(error)
        gate = self.config.app
        assert isinstance(gate, AccessGate)
        gate.refused(error.http_status)


class FrontServer:
    """One run of the front: link, HTTP and signals, and the order in which they begin and end."""

    def __init__(
        self,
        config: EngineConfig,
        section: FrontSection,
        owner: Owner,
        listener: socket.socket,
        supervisor: FrontSupervisor | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        self._siblings = siblings
        self._config = config
        self._section = section
        self._owner = owner
        self._listener = listener
        self._supervisor = supervisor
        self._signal = 0
        """The first one that came."""

    async def run(self, caught: Sequence[int] = ()) -> int:
        """Returns the exit status. ``caught``: signals that came while the event loop began."""
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self._open = asyncio.Event()
        """Set when this front can answer requests."""
        handled = signals.heeded() if self._supervisor is None else []
        for number in handled:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        for early in caught:
            self._on_signal(early)
        if self._supervisor is not None:
            self._supervisor.attach(self._stop.set, self._cut)
        joining = self._supervisor is not None and self._supervisor.serving
        front = Front(self._config, self._section, self._owner, self._siblings, joining)
        self._front = front
        front.drain = self._drain_asked
        http = _Uvicorn(self._uvicorn_config(front))
        serving = asyncio.create_task(self._serve_http(http))
        try:
            return await self._live(serving)
        finally:
            front.lifecycle.move(Phase.DEAD)
            await front.close(shutdown=self._supervisor is None)
            await self._until_idle(GRACE)
            http.should_exit = True
            http.force_exit = self._stop_now.is_set()
            if self._waits_to_listen:
                serving.cancel()
            await asyncio.wait({serving}, timeout=2 * GRACE + 1)
            signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)  # the loop gives them their default back
            for number in handled:
                asyncio.get_running_loop().remove_signal_handler(number)
            signals.ignore()

    @property
    def _waits_to_listen(self) -> bool:
        """Whether connections are other fronts' until this one can answer requests."""
        return self._supervisor is not None and self._supervisor.serving and not self._open.is_set()

    async def _serve_http(self, http: uvicorn.Server) -> None:
        if self._waits_to_listen:
            await self._open.wait()
        await http.serve(sockets=[self._listener])

    def _uvicorn_config(self, front: Front) -> uvicorn.Config:
        logging.getLogger("uvicorn").parent = logging.getLogger("weft")
        section = self._section
        hosts = Hosts(
            section.host,
            self._listener.getsockname()[0],
            section.allowed_hosts,
            keys=bool(section.api_key),
        )
        connections = Connections(most_connections(allow_files(), front.lifecycle.capacity))
        return uvicorn.Config(
            build_app(front, hosts),
            http=functools.partial(_Connection, connections=connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",  # its warnings are of what clients send: they could fill the log with them
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE,
        )

    # -- phases -------------------------------------------------------------------------------------

    async def _live(self, serving: asyncio.Task[None]) -> int:
        """Start, serve, drain. Returns the exit status, with the link still open."""
        front = self._front
        try:
            if not await self._unless_stopped(front.start(), serving):
                return 128 + self._signal if self._signal else 1
            if not await self._unless_stopped(probe(front), serving):
                return 128 + self._signal if self._signal else 1
        except ConfigError:
            raise
        except WeftError as error:
            log.error("the server can't start: %s", error.message)
            return 1
        gc.freeze()  # objects that exist as long as the server are not scanned again
        front.lifecycle.move(Phase.READY)
        self._open.set()
        self._announce()
        await self._unless_stopped(front.links.died.wait(), serving)
        if front.links.failure is not None:
            log.error("the engine is dead: %s", front.links.failure.message)
            front.lifecycle.move(Phase.DEAD)
            return 1
        if not self._stop.is_set():
            log.error("the HTTP server ended by itself")
            return 1
        return await self._drain()

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any], serving: asyncio.Task[None]) -> bool:
        """Runs ``work`` until a signal or the end of HTTP. Whether it came to its end; raises its error."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop, serving}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _drain(self) -> int:
        """Lets running requests finish; new ones are refused meanwhile."""
        front = self._front
        front.lifecycle.move(Phase.DRAINING)
        self._owner.drain()
        if front.lifecycle.active:
            may = f"may run for {self._section.drain_timeout:g} more seconds; a second Ctrl-C stops at once"
            log.info("stopping: %s %s", _requests(front.lifecycle.active), may)
        else:
            log.info("stopping")
        await self._until_idle(self._section.drain_timeout)
        if front.links.failure is not None:
            return 1
        if front.lifecycle.active:
            log.warning("%s did not finish in time", _requests(front.lifecycle.active))
            front.links.fail_all(Unavailable("the server shut down before the request was finished"))
        return FORCED if self._stop_now.is_set() else 0

    async def _until_idle(self, seconds: float) -> None:
        """Waits until no request is active, at most ``seconds``, and not past a second signal."""
        front = self._front
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while front.lifecycle.active and loop.time() < deadline and not self._stop_now.is_set():
            await asyncio.sleep(0.02)

    def _on_signal(self, number: int) -> None:
        # A terminal that is closed sends SIGHUP more than once, and its shell does, too: none of them cuts.
        if self._signal and number != signal.SIGHUP:
            self._stop_now.set()
        self._signal = self._signal or number
        self._stop.set()

    def _drain_asked(self) -> None:
        """An operator asks by HTTP; asked again, nothing is cut."""
        if self._supervisor is not None:
            self._supervisor.drain()
        elif not self._signal:
            self._on_signal(signal.SIGTERM)

    def _cut(self) -> None:
        self._stop_now.set()
        self._stop.set()

    # -- the ready line -----------------------------------------------------------------------------

    def _announce(self) -> None:
        if self._supervisor is not None:
            self._supervisor.ready()
            return
        chat = self._front.text.chat
        chats = chat.source is not None and chat.problem is None
        sys.stdout.write(ready_text(self._listener, self._config, self._section, chats=chats))
        sys.stdout.flush()


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def ready_text(listener: socket.socket, config: EngineConfig, section: FrontSection, *, chats: bool) -> str:
    """What is printed when the server answers requests: one line for machines, one command for people.
    ``chats``: there is a chat template.

    The first line is ``weft is ready: URL model=NAME``; its form is a contract of the command line.
    """
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    first = first_request.command(url, config, section, chats=chats)
    return f"weft is ready: {url} model={config.served_names[0]}\ntry: {first}\n"
