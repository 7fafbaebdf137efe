"""The engine process: serves one engine behind a zmq ROUTER, with the messages of ``weft.types.messages``.

One thread does everything. Between steps the thread handles messages of API servers. Heartbeats leave from
the step loop, so a heartbeat proves progress. An invalid frame is counted and dropped.
``weft.control.fleet.engine_protocol`` decides the answers.

Pixels in shared memory of API servers on the same host are mapped before a sequence is submitted. A mapping
lasts until neither the sequence nor a step refers to the mapping, even if the API server is killed. An engine
process with ranks in other processes also keeps a descriptor meanwhile, so ranks can open the memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

import msgspec
import zmq

from weft.common.counted_log import CountedLog
from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.common.shared_bytes import SharedBytes, SharedName, most_descriptors, open_shared
from weft.config.names import engine_identity, process_name
from weft.config.resolved import EngineConfig
from weft.control.fleet.engine_protocol import (
    AdapterLoader,
    EngineInterface,
    EngineProtocol,
    Outgoing,
    WeightsLoader,
)
from weft.engine.server.listener import Listener
from weft.engine.server.profiling import Profiler
from weft.types import messages as m
from weft.types.handshake import EngineIdentity
from weft.types.media_item import MediaItem
from weft.types.messages import Submit, decode_parts
from weft.types.tier_flush import FlushTier

log = get_logger(__name__)


class PixelInbox:
    """Mappings of the pixels published for one engine process. Call ``close`` when no API server can be
    welcomed any more.
    """

    def __init__(self, shows: bool) -> None:
        """Create the probe memory. Without shared memory, ``probe`` is None.

        ``shows``: True if other processes of the group must be able to open the memory.
        """
        self._shows = shows
        self._kept = 0
        self._probe: SharedBytes | None = None
        self.probe: SharedName | None = None
        """Name of a probe memory: an API server that can open the probe can use shared memory. None without
        shared memory.
        """
        try:
            self._probe = SharedBytes(0)
            self._probe.seal()
            self.probe = self._probe.name
        except OSError:
            self.close()

    def take(self, submit: Submit) -> Submit:
        """Return ``submit`` with the pixels of all shared names mapped.

        Without shared names, return ``submit`` unchanged. Raises PixelsLost if a memory cannot be opened.
        """
        if all(item.shared is None for item in submit.media):
            return submit
        media = tuple(
            item if item.shared is None else self._taken(item, item.shared) for item in submit.media
        )
        return msgspec.structs.replace(submit, media=media)

    def close(self) -> None:
        """Close the probe. Idempotent."""
        if self._probe is not None:
            self._probe.close()

    def _taken(self, item: MediaItem, name: SharedName) -> MediaItem:
        """Return ``item`` with mapped pixels.

        ``shared`` names this process's descriptor, or is None unless other processes must open the memory and
        a descriptor is free.
        """
        fd, view = open_shared(name)
        here = None
        # Ranks open the memory through the descriptor, which closes with the last view of the mapping.
        if self._shows and self._kept < most_descriptors():
            here = msgspec.structs.replace(name, pid=os.getpid(), fd=fd)
            self._kept += 1
            ended = weakref.finalize(view.obj, self._let_go, fd)
            ended.atexit = False
        else:
            os.close(fd)
        return msgspec.structs.replace(item, pixels=cast(bytes, view), shared=here)

    def _let_go(self, fd: int) -> None:
        self._kept -= 1
        os.close(fd)


HEARTBEAT_S = 0.5
IDLE_POLL_MS = 100
REPORT_S = 60.0
"""Seconds between two log lines about draft acceptance."""


class ServedEngine(EngineInterface, Protocol):
    """The engine interface of the loop. See ``weft.engine.core.EngineCore`` and
    ``weft.engine.scripted.scripted.ScriptedEngine``.
    """

    @property
    def incarnation(self) -> int: ...

    @property
    def sockets(self) -> Sequence[Any]: ...

    @property
    def steps(self) -> int: ...

    @property
    def transferring(self) -> bool: ...

    def check(self) -> None: ...

    def poll(self) -> list[m.TokenEvent]: ...

    def step(self) -> list[m.TokenEvent]: ...

    def describe_speculation(self) -> str | None: ...

    def close(self, failed: bool = False) -> None: ...


class EngineServer:
    """Serves one engine to API servers. ``run`` returns after a shutdown message or once drained."""

    def __init__(
        self,
        core: ServedEngine,
        endpoint: str | Listener,
        *,
        wait_ms: Callable[[], int] | None = None,
        profiler: Profiler | None = None,
        shows: bool = False,
        identity: EngineIdentity | None = None,
        adapters: AdapterLoader | None = None,
        weights: WeightsLoader | None = None,
        flush: Callable[[FlushTier], None] | None = None,
        look: Callable[[bool], None] = lambda idle: None,
    ) -> None:
        """``core``: the engine, closed at the end of ``run``.

        ``endpoint``: the address to listen at, or an open listener. ``wait_ms``: returns the milliseconds for
        which a busy engine may wait for messages (default: 0). ``profiler``: default: none. ``shows``: True
        if other processes of the group must be able to open images in shared memory. ``identity``,
        ``adapters`` and ``weights``: see ``EngineProtocol``. ``flush``: empties the KV cache; None without
        a cache. ``look``: called between steps, with True if no sequence runs.
        """
        self._look = look
        self._profiler = profiler or Profiler(None, "")
        self._flush = flush
        self._core = core
        self._wait_ms = wait_ms or (lambda: 0)
        self._listener = Listener(endpoint) if isinstance(endpoint, str) else endpoint
        self._socket = self._listener.socket
        self._poller = zmq.Poller()
        for one in (self._socket, *core.sockets):
            self._poller.register(one, zmq.POLLIN)
        self._pixels = PixelInbox(shows)
        self._protocol = EngineProtocol(core, core.incarnation, self._pixels, identity, adapters, weights)
        self._last_heartbeat = 0.0
        self._strangers = CountedLog(log)
        self._next_report = time.monotonic() + REPORT_S

    def run(self) -> None:
        """Serve until shutdown or until drained, then close the engine, the listener and the profile.

        Raises errors of the engine, after a log line and a report to every API server.
        """
        failed = False
        try:
            while not self._protocol.stopped:
                busy = self._core.has_work()
                self._receive(self._wait_ms() if busy else IDLE_POLL_MS)
                self._core.check()  # before `poll`, which handles the transfer reports received here
                self._tell(self._core.poll())
                self._send(self._protocol.adapters_changed())
                self._send(self._protocol.weights_changed())
                # `poll` may have created work, so ask again.
                if self._core.has_work():
                    busy = True
                    self._tell(self._core.step())
                elif self._protocol.draining and not self._protocol.live and not self._core.transferring:
                    break  # blocked sequences have ended by then, because each has a time limit
                # Send a heartbeat as soon as the engine is idle. Otherwise gauges would show load for up to
                # half a second.
                idle = not self._core.has_work()
                self._heartbeat(at_once=busy and idle)
                self._look(idle)
                if self._profiler.running:
                    self._profiler.look()
        except Exception as error:
            failed = True
            self._tell_failure(error)
            raise
        finally:
            self._listener.close()
            self._pixels.close()
            self._profiler.end()
            self._core.close(failed)

    def _receive(self, wait_ms: int) -> None:
        """Handle all arrived messages.

        Block up to ``wait_ms`` milliseconds for the first, or for another socket of the engine.
        """
        if self._socket not in dict(self._poller.poll(wait_ms)):
            return
        while True:
            try:
                frames = self._listener.receive()
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: list[Any]) -> None:
        """Handle one message of an API server and send the answers.

        An invalid frame is counted, logged and dropped.
        """
        try:
            front, body, *attached = frames
            message = decode_parts(body, attached)
        except (ValueError, msgspec.DecodeError) as error:
            self._protocol.bad_frames += 1
            self._strangers.warn("dropped an invalid frame (%s)", type(error).__name__)
            return
        if isinstance(message, m.Profile):
            self._profiler.ask(message.seconds)
        if isinstance(message, FlushTier) and self._flush is not None:
            self._flush(message)
        self._send(self._protocol.on(front, message))

    def _tell(self, events: list[m.TokenEvent]) -> None:
        self._send(self._protocol.events(events, self._core.steps))

    def _send(self, outgoing: Outgoing) -> None:
        """Send messages to API servers.

        Does not block. The sequences of an API server that does not read end; logged.
        """
        for front, message in outgoing:
            try:
                self._socket.send_multipart([front, m.encode(message)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.warning("an API server is gone or does not read (%s): its sequences end", error.strerror)
                self._protocol.forget(front)

    def _heartbeat(self, at_once: bool) -> None:
        """Send a heartbeat to every API server if one is due or ``at_once``.

        Also write the periodic log line.
        """
        now = time.monotonic()
        if now - self._last_heartbeat < HEARTBEAT_S and not at_once:
            return
        self._last_heartbeat = now
        self._report(now)
        self._send(self._protocol.heartbeats())

    def _report(self, now: float) -> None:
        """Log the share of accepted drafts every ``REPORT_S`` seconds while the engine has work."""
        if now < self._next_report:
            return
        self._next_report = now + REPORT_S
        report = self._core.describe_speculation()
        if report is not None and self._core.has_work():
            log.info("%s", report)

    def _tell_failure(self, error: Exception) -> None:
        """Log an error of the engine and report it to every API server."""
        known = (
            error if isinstance(error, WeftError) else EngineDead("the engine failed; see the server's log")
        )
        log.error("the engine failed: %s", error, exc_info=not isinstance(error, WeftError))
        self._send(self._protocol.failed(known))


def tell_why(listener: Listener, error: WeftError) -> None:
    """Report the start error, as EngineDead, to all API servers that have said hello. Does not block."""
    with contextlib.suppress(zmq.ZMQError):
        while True:
            front, *_ = listener.receive()
            failed = m.EngineFailed(error=EngineDead(error.message).info())
            listener.socket.send_multipart([front, m.encode(failed)], zmq.NOBLOCK)


def run_engine(config: EngineConfig, listener: Listener, pipe: int | None = None) -> None:
    """Load the model and serve the model at ``listener`` until shutdown.

    The entry point of the engine process.

    ``pipe``: descriptor of the pipe to the rank supervisor; None if the engine process starts the workers.
    Raises errors of the start, after closing ``listener``, and errors of the engine. API servers that have
    said hello receive a WeftError of the start.
    """
    # The modules below import torch. An engine process without a model does not need torch.
    from weft.engine.core import EngineCore
    from weft.engine.cpu_threads import CpuThreads
    from weft.engine.ranks.supervised_ranks import SupervisedRanks
    from weft.engine.start import start_executor
    from weft.tracing.writer import open_writer

    try:
        supervised = None if pipe is None else SupervisedRanks(Connection(pipe))
        threads = CpuThreads(config)
        runner = config.runner
        spans = open_writer(runner.trace_requests, process_name(config), runner.otlp_traces_endpoint)
        core = EngineCore(config, runner=start_executor(config, supervised=supervised), spans=spans)
    except BaseException as error:
        if isinstance(error, WeftError):
            tell_why(listener, error)
        listener.close()
        raise
    kv = core.runner.kv  # on a GPU, pool sizes are known only after the weights are loaded
    pools = ", ".join(pool.describe(config.dtype) for pool in kv.pools)
    if not pools and kv.media is not None:
        pools = kv.media.describe()
    log.info(
        "engine ready: %s, %s on %s, %s", pools, config.dtype, config.device, core.describe_determinism()
    )
    gc.collect()
    gc.freeze()  # the model and all modules live as long as the process: the collector should skip them
    profiler = Profiler(config.runner.profile_dir, process_name(config))
    shows = bool(core.runner.membership.members)
    EngineServer(
        core,
        listener,
        wait_ms=core.wait_ms,
        profiler=profiler,
        shows=shows,
        identity=engine_identity(config),
        adapters=core.adapters,
        weights=core.weights,
        flush=core.flush,
        look=threads.look,
    ).run()
