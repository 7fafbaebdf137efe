"""The API server as a process: from a bound port and a ready line to an exit status."""

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

from weft.common import log as weft_log
from weft.common import signals
from weft.common.allocator import keep_heap_small
from weft.common.errors import ConfigError, Unavailable, WeftError
from weft.common.open_files import allow_files
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection
from weft.control.links.owner import Owner
from weft.front import first_request
from weft.front.app import build_app
from weft.front.connection import MOST_CONNECTIONS, Connection, Connections
from weft.front.http.access import Hosts
from weft.front.http.tls import ServerLoop, open_tls
from weft.front.lifecycle import Phase
from weft.front.middleware import AccessGate
from weft.front.requests.context import Front
from weft.front.requests.generation import probe
from weft.front.requests.models.several_models import ModelSet
from weft.front.siblings import Siblings

log = weft_log.get_logger(__name__)

GRACE = 2
"""Seconds for the last bytes of connections when the server stops."""
SWITCH_INTERVAL = 0.0005
"""Maximum seconds for which a text thread keeps the event loop from running Python."""
BACKLOG = 512
"""Connections queued in the kernel before accept. As many may be accepted at once, 0.1 ms each."""
SEND_BUFFER = 64 << 10
"""Bytes of answers that the kernel buffers per connection. The kernel's own choice grows to megabytes,
which would hide a client that does not read."""
GC_OBJECTS = 10_000
"""New objects between two garbage collections. A request makes about a thousand objects, and nearly all are
freed without the collector."""
FORCED = 130
"""Exit status after a second signal cut requests off."""


class FrontSupervisor(Protocol):
    """The process that runs this API server and owns the engine processes."""

    serving: bool
    """True if other API servers answer requests already. Then this process accepts no connection before it
    is ready."""

    def attach(self, drain: Callable[[], None], stop: Callable[[], None]) -> None:
        """Register the callbacks for a requested drain and a requested immediate stop.

        The callbacks run on the running event loop.
        """

    def ready(self) -> None:
        """Note that this API server answers requests now."""

    def drain(self) -> None:
        """Drain and end the whole server."""


def serve(
    config: EngineConfig,
    front: FrontSection,
    owner: Owner | ModelSet,
    supervisor: FrontSupervisor | None = None,
    siblings: Siblings | None = None,
    listener: socket.socket | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal (0, after draining), a second signal (130) or the death of the last engine
    process (1). Return the exit status; blocks until then.

    A signal before the server is ready ends the server at once, with status 128 plus the signal's number. A
    failed start returns 1. ``owner`` owns the engine processes. Without ``supervisor`` the engine processes
    belong to this server. At the return they are dead, or have the order to stop. With ``supervisor`` the
    engine processes and the port are shared with other API servers: the engine processes stay, and signals
    are ignored. Call from the main thread. ``signals.STOPS`` are handled here and ignored after the return,
    because only the end of the process follows. ``listener``: socket that listens already; None to bind the
    port here. ``on_ready``: called once, when this server answers requests. Raises ConfigError for an
    unusable port, tokenizer or TLS file.
    """
    caught: list[int] = []
    # Only record signals for now: an exception in a handler would leave the event loop half started.
    if supervisor is None:
        for number in signals.handled_stops():
            signal.signal(number, lambda number, _: caught.append(number))
    at_once = supervisor is None or not supervisor.serving
    if listener is None:
        listener = bind(front.host, front.port, shared=supervisor is not None, listens=at_once)
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_heap_small()
    with asyncio.Runner(loop_factory=ServerLoop) as runner:
        server = FrontServer(config, front, owner, listener, supervisor, siblings, on_ready)
        return runner.run(server.run(caught))


def bind(host: str, port: int, *, shared: bool = False, listens: bool = True) -> socket.socket:
    """Return a socket bound to the address. ``listens``: also listen; otherwise only reserve the address.
    ``shared``: allow other sockets of this server on the same port. Raises ConfigError that names the
    flags."""
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address as in a URL
        host = host[1:-1]
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
            listener.bind(address)  # with the scope of a link-local address
            if listens:
                listener.listen(BACKLOG)
            elif not shared:
                # With the option, another server could listen on the port before ours do. An API server that
                # listens later keeps the option: otherwise its ended connections would block the port for a
                # minute after the end of the server.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except BaseException:
            listener.close()
            raise
        return listener
    except UnicodeError as error:
        raise ConfigError(f"--host {host[:200]!r} is no host name: {error}", param="host") from None
    except OSError as error:
        # Python rewords some of these errors, with the address in the text; the system's text is plain.
        number = error.errno or 0
        system = os.strerror(number) if number > 0 else error.strerror
        reason = (system or "unknown reason").lower()
        raise ConfigError(
            f"cannot listen on port {port} ({reason}); change --host or --port", param="port"
        ) from None


class _Uvicorn(uvicorn.Server):
    """uvicorn server without signal handling: ``FrontServer`` handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(Connection):
    """Connection with reports to the gate, which counts refused connections that never became a request."""

    def _refuse(self, error: WeftError) -> None:
        super()._refuse(error)
        gate = self.config.app
        assert isinstance(gate, AccessGate)
        gate.refused(error.http_status)


class FrontServer:
    """One run of the API server: link, HTTP and signals, with the order of start and end."""

    def __init__(
        self,
        config: EngineConfig,
        section: FrontSection,
        owner: Owner | ModelSet,
        listener: socket.socket,
        supervisor: FrontSupervisor | None = None,
        siblings: Siblings | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """``listener``: bound socket. ``supervisor``, ``siblings``: None for a single API server, which
        then owns the signals and ends the engine processes. ``on_ready``: see ``serve``."""
        self._on_ready = on_ready
        self._siblings = siblings
        self._config = config
        self._section = section
        self._tls = open_tls(section)
        self._owner = owner
        self._listener = listener
        self._supervisor = supervisor
        self._signal = 0
        """First received signal; 0 before."""

    async def run(self, caught: Sequence[int] = ()) -> int:
        """Run the server and return the exit status, see ``serve``. ``caught``: signals received during the
        start of the event loop. At the return, links and HTTP are closed and signals are ignored. Raises
        ConfigError."""
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self._open = asyncio.Event()
        """Set once this API server can answer requests."""
        handled = signals.handled_stops() if self._supervisor is None else []
        for number in handled:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        for early in caught:
            self._on_signal(early)
        if self._supervisor is not None:
            self._supervisor.attach(self._stop.set, self._cut)
        # Engines that run alone come and go: the server starts with any set that can serve requests.
        joining = self._owner.shared if self._supervisor is None else self._supervisor.serving
        front = Front(self._config, self._section, self._owner, self._siblings, joining)
        self._front = front
        front.drain = self._drain_asked
        http = _Uvicorn(self._uvicorn_config(front))
        serving = asyncio.create_task(self._serve_http(http))
        try:
            return await self._live(serving)
        finally:
            # Order: fail the open requests, give the answers time to leave, end HTTP, then ignore signals.
            front.lifecycle.move(Phase.DEAD)
            await front.close(shutdown=not self._owner.shared)
            await self._until_idle(GRACE)
            http.should_exit = True
            http.force_exit = self._stop_now.is_set()
            if self._waits_to_listen:
                serving.cancel()
            await asyncio.wait({serving}, timeout=2 * GRACE + 1)
            # The loop restores the default handlers, so block the signals first.
            signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
            for number in handled:
                asyncio.get_running_loop().remove_signal_handler(number)
            signals.ignore()

    @property
    def _waits_to_listen(self) -> bool:
        """True while other API servers take all connections: this process cannot answer requests yet."""
        return self._supervisor is not None and self._supervisor.serving and not self._open.is_set()

    async def _serve_http(self, http: uvicorn.Server) -> None:
        """Run uvicorn until its end. While other API servers take all connections, wait until this server
        can answer."""
        if self._waits_to_listen:
            await self._open.wait()
        await http.serve(sockets=[self._listener])

    def _uvicorn_config(self, front: Front) -> uvicorn.Config:
        """Return uvicorn's configuration with the application. Raises the limit of open files, and sends
        uvicorn's log to Weft's."""
        logging.getLogger("uvicorn").parent = logging.getLogger("weft")
        section = self._section
        hosts = Hosts(
            section.host,
            self._listener.getsockname()[0],
            section.allowed_hosts,
            keys=bool(section.api_key),
        )
        files = allow_files()
        connections = Connections(lambda: most_connections(files, front.lifecycle.capacity))
        tls = self._tls
        return uvicorn.Config(
            build_app(front, hosts),
            http=functools.partial(_Connection, connections=connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",  # uvicorn's warnings are about client errors, so clients could fill the log
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE,
            ssl_context_factory=None if tls is None else lambda config, default: tls.context,
        )

    # -- phases -------------------------------------------------------------------------------------

    async def _live(self, serving: asyncio.Task[None]) -> int:
        """Start, serve and drain. Return the exit status; the links stay open. Raises ConfigError; another
        WeftError of the start is logged and returns 1."""
        front = self._front
        try:
            if not await self._unless_stopped(front.start(), serving):
                return 128 + self._signal if self._signal else 1
            proof = probe(front) if front.several is None else front.several.start(probe)
            if not await self._unless_stopped(proof, serving):
                return 128 + self._signal if self._signal else 1
        except ConfigError:
            raise
        except WeftError as error:
            log.error("the server cannot start: %s", error.message)
            return 1
        gc.freeze()  # objects with the lifetime of the server are not scanned again
        gc.set_threshold(GC_OBJECTS, 20, 20)
        front.lifecycle.move(Phase.READY)
        self._open.set()
        self._announce()
        self._on_ready()
        died = front.links.died if front.several is None else front.several.died
        await self._unless_stopped(died.wait(), serving)
        if (failure := front.failure) is not None:
            log.error("the engine has failed, and the server stops: %s", failure.message)
            front.lifecycle.move(Phase.DEAD)
            return 1
        if not self._stop.is_set():
            log.error("the HTTP server stopped unexpectedly")
            return 1
        return await self._drain()

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any], serving: asyncio.Task[None]) -> bool:
        """Run ``work`` until a signal or the end of HTTP. Return True if ``work`` finished; False after its
        cancellation. Raises the exception of ``work``."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop, serving}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        # Also if a signal arrived at the same time: finished work counts.
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _drain(self) -> int:
        """Let running requests finish, within the drain time-out, and refuse new requests. Requests that
        are left fail with Unavailable. Return the exit status: 0, 130 after a second signal, or 1 if the
        engine failed."""
        front = self._front
        front.lifecycle.move(Phase.DRAINING)
        (front.model.owner if front.several is None else front.several).drain()
        if front.lifecycle.active:
            may = f"may run for {self._section.drain_timeout:g} more seconds; a second Ctrl-C stops at once"
            log.info("stopping: %s %s", _requests(front.lifecycle.active), may)
        else:
            log.info("stopping")
        await self._until_idle(self._section.drain_timeout)
        if front.failure is not None:
            return 1
        if front.lifecycle.active:
            log.warning("%s did not finish within --drain-timeout", _requests(front.lifecycle.active))
            links = front.links if front.several is None else front.several
            links.fail_all(Unavailable("the server shut down before the request was finished"))
        return FORCED if self._stop_now.is_set() else 0

    async def _until_idle(self, seconds: float) -> None:
        """Wait until no request is active, for at most ``seconds`` and until a second signal."""
        front = self._front
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while front.lifecycle.active and loop.time() < deadline and not self._stop_now.is_set():
            await asyncio.sleep(0.02)

    def _on_signal(self, number: int) -> None:
        """Begin the drain at the first signal. A later signal, except SIGHUP, also cuts requests off."""
        # A closing terminal sends SIGHUP more than once, and so does its shell. SIGHUP never cuts requests
        # off.
        if self._signal and number != signal.SIGHUP:
            self._stop_now.set()
        self._signal = self._signal or number
        self._stop.set()

    def _drain_asked(self) -> None:
        """Handle an operator's drain request by HTTP. Idempotent: a repeated request cuts no request off."""
        if self._supervisor is not None:
            self._supervisor.drain()
        elif not self._signal:
            self._on_signal(signal.SIGTERM)

    def _cut(self) -> None:
        self._stop_now.set()
        self._stop.set()

    # -- the ready line -----------------------------------------------------------------------------

    def _announce(self) -> None:
        """Report readiness to the supervisor, or print the ready text to stdout."""
        if self._supervisor is not None:
            self._supervisor.ready()
            return
        several = self._front.several
        names = () if several is None else several.names
        if several is None:
            chat = self._front.text.chat
            chats = chat.source is not None and chat.problem is None
        else:
            chats = first_request.has_template(self._config, self._section)
        print_ready(ready_text(self._listener, self._config, self._section, chats=chats, names=names))


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def print_ready(text: str) -> None:
    """Write ``text`` to standard output. If nobody reads the output, or the disk is full, the server serves
    anyway, and the log has the reason."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        log.warning("the ready line cannot be written to standard output: %s", error.strerror)
        # The text is still in the buffer, and would fail again at the exit of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ready_text(
    listener: socket.socket,
    config: EngineConfig,
    section: FrontSection,
    *,
    chats: bool,
    names: Sequence[str] = (),
) -> str:
    """Return the text printed once the server answers requests: a line for machines, and a command for
    people. ``chats``: True if the model has a chat template. ``names``: of several models, for
    `` models=NAME,NAME`` in place of `` model=NAME``.

    The first line is ``weft is ready: URL model=NAME``, and `` implementation=transformers`` behind the name
    where transformers computes the model. The form of the line is a contract of the command line.
    """
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "http" if section.ssl_certfile is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    first = first_request.command(url, config, section, chats=chats)
    other = config.spec.implementation
    said = "" if other == "weft" or names else f" implementation={other}"
    which = f"models={','.join(names)}" if names else f"model={config.served_names[0]}"
    return f"weft is ready: {url} {which}{said}\ntry: {first}\n"


def most_connections(files: int, requests: int) -> int:
    """Return the limit for ``files`` open files and ``requests`` concurrent requests.

    A quarter of the files stays free for the engine's sockets, and for files opened before others have
    closed.
    """
    return max(min(files * 3 // 4, max(MOST_CONNECTIONS, 2 * requests)), 1)
