"""The head process: an ``EngineCore`` behind one zmq ROUTER, speaking ``weft.types.messages``.

One thread does everything: between steps it takes what fronts sent, and a heartbeat leaves from the same
loop that steps, so that a heartbeat proves progress. A bad frame is counted and dropped; a front that went
away, or does not read, loses its own sequences and nothing else.
"""

from __future__ import annotations

import gc
import secrets
import time
from multiprocessing.connection import Connection

import msgspec
import zmq

from weft.common.errors import EngineDead, InvalidRequest, Unavailable, WeftError
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.engine.kept import KeptRanks
from weft.engine.listener import Listener
from weft.engine.start import start_executor
from weft.types import messages as m

log = get_logger(__name__)

HEARTBEAT_S = 0.5
IDLE_POLL_MS = 100
REPORT_S = 60.0
"""Seconds between two reports on drafts in the log, if there are any."""


class Head:
    """The loop of a head. ``run`` returns when told to shut down, or when drained."""

    def __init__(self, core: EngineCore, endpoint: str | Listener) -> None:
        """``endpoint``: where to listen, or what listens there already."""
        self._core = core
        self._listener = Listener(endpoint) if isinstance(endpoint, str) else endpoint
        self._socket = self._listener.socket
        self._poller = zmq.Poller()
        for one in (self._socket, *(core.domain.sockets if core.domain is not None else ())):
            self._poller.register(one, zmq.POLLIN)
        self._incarnation = secrets.randbits(64)
        self._fronts: dict[bytes, bool] = {}
        """And whether each wants heartbeats only while it has sequences."""
        self._owner: dict[int, bytes] = {}
        self._bad_frames = 0
        self._draining = False
        self._stop = False
        self._last_beat = 0.0
        self._next_report = time.monotonic() + REPORT_S

    def run(self) -> None:
        """Serves until shutdown. Raises what the engine raised, after telling every front."""
        failed = False
        try:
            while not self._stop:
                busy = self._core.has_work()
                self._receive(0 if busy else IDLE_POLL_MS)
                self._core.check()
                if self._core.has_work():
                    busy = True
                    self._dispatch(self._core.step())
                elif self._draining:
                    break
                # Fronts hear at once that all is done: their gauges would show what ran for a while yet.
                self._beat(at_once=busy and not self._core.has_work())
        except Exception as error:
            failed = True
            self._last_words(error)
            raise
        finally:
            self._listener.close()
            self._core.close(failed)

    def _receive(self, wait_ms: int) -> None:
        if self._socket not in dict(self._poller.poll(wait_ms)):
            return
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        try:
            front, body = frames
            message = m.decode_to_head(body)
        except (ValueError, msgspec.DecodeError) as error:
            self._bad_frames += 1
            log.warning("dropped a frame that is not a message (%s)", type(error).__name__)
            return
        if isinstance(message, m.Hello):
            self._hello(front, message)
        elif front not in self._fronts:
            self._bad_frames += 1
        elif isinstance(message, m.Submit):
            self._submit(front, message)
        elif isinstance(message, m.Finish):
            if self._owner.get(message.sequence) == front:
                self._dispatch(self._core.finish(message.sequence))
        elif isinstance(message, m.Drain):
            self._draining = True
        else:
            self._stop = True

    def _hello(self, front: bytes, hello: m.Hello) -> None:
        low, high = hello.versions
        if not low <= m.VERSION <= high:
            message = f"this head speaks version {m.VERSION}, the front {low} to {high}"
            self._send(front, m.HeadFailed(error=EngineDead(message).info()))
            return
        self._fronts[front] = hello.quiet
        self._send(front, self._core.welcome(self._incarnation))
        self._send(front, self._heartbeat())

    def _submit(self, front: bytes, submit: m.Submit) -> None:
        if submit.sequence in self._owner:
            # The id is live, perhaps another front's: answering would end a stranger's stream.
            self._bad_frames += 1
            return
        try:
            if self._draining:
                raise Unavailable("the server is shutting down")
            events = self._core.submit(submit)
        except (ValueError, msgspec.ValidationError):
            self._reject(front, submit.sequence, InvalidRequest("the request is malformed"))
        except WeftError as error:
            self._reject(front, submit.sequence, error)
        else:
            self._owner[submit.sequence] = front
            self._dispatch(events)

    def _reject(self, front: bytes, sequence: int, error: WeftError) -> None:
        event = m.TokenEvent(sequence=sequence, finish="error", error=error.info())
        self._send(front, m.Tokens(step=-1, events=(event,)))

    def _dispatch(self, events: list[m.TokenEvent]) -> None:
        """Sends a step's events, one message to each front."""
        by_front: dict[bytes, list[m.TokenEvent]] = {}
        for event in events:
            owner = self._owner.get(event.sequence)
            if owner is None:
                continue
            by_front.setdefault(owner, []).append(event)
            if event.finish is not None:
                del self._owner[event.sequence]
        for front, its in by_front.items():
            self._send(front, m.Tokens(step=self._core.scheduler.steps, events=tuple(its)))

    def _send(self, front: bytes, message: m.ToFront) -> None:
        try:
            self._socket.send_multipart([front, m.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("a front is gone or does not read (%s): its sequences end", error.strerror)
            self._forget(front)

    def _forget(self, front: bytes) -> None:
        self._fronts.pop(front, None)
        for sequence in [s for s, owner in self._owner.items() if owner == front]:
            del self._owner[sequence]
            self._core.finish(sequence)

    def _heartbeat(self) -> m.Heartbeat:
        stats = msgspec.structs.replace(self._core.stats(), bad_frames=self._bad_frames)
        # A group that is being formed has deadlines of its own.
        return m.Heartbeat(idle=self._core.recovering or not self._core.has_work(), stats=stats)

    def _beat(self, at_once: bool) -> None:
        now = time.monotonic()
        if now - self._last_beat < HEARTBEAT_S and not at_once:
            return
        self._last_beat = now
        self._report(now)
        beat = self._heartbeat()
        busy = set(self._owner.values())  # for membership only
        for front, quiet in list(self._fronts.items()):
            if front in busy or not quiet:
                self._send(front, beat)

    def _report(self, now: float) -> None:
        if now < self._next_report:
            return
        self._next_report = now + REPORT_S
        report = self._core.describe_speculation()
        if report is not None and self._core.has_work():
            log.info("%s", report)

    def _last_words(self, error: Exception) -> None:
        """Tells every front. What is live does not end here: a front may go on with it at another head."""
        known = (
            error if isinstance(error, WeftError) else EngineDead("the engine failed; see the server's log")
        )
        log.error("the engine failed: %s", error, exc_info=not isinstance(error, WeftError))
        # Sequences get no event of their own: their front may have another head that goes on with them.
        for front in list(self._fronts):
            self._send(front, m.HeadFailed(error=known.info()))


def run_head(config: EngineConfig, listener: Listener, pipe: int | None = None) -> None:
    """Loads the model and serves it at ``listener`` until told to stop. The entry of the head process.

    ``pipe``: the descriptor of the pipe to whoever keeps the workers.
    """
    try:
        kept = None if pipe is None else KeptRanks(Connection(pipe))
        core = EngineCore(config, runner=start_executor(config, kept=kept))
    except BaseException:
        listener.close()
        raise
    kinds = core.runner.kv.pools  # a GPU's are divided when the weights are there
    pools = ", ".join(pool.describe(config.dtype) for pool in kinds)
    log.info(
        "engine ready: %s, %s on %s, %s", pools, config.dtype, config.device, core.describe_determinism()
    )
    gc.collect()
    gc.freeze()  # the model and all modules live as long as the process: never look through them again
    Head(core, listener).run()
