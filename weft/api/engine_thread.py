"""An engine in a thread of its own, for callers on an event loop.

The thread owns the engine. Commands reach it through a queue; what comes back goes to each sequence's sink,
called in the thread. Every sink gets a terminal event, the engine's death included.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from weft.common.errors import EngineDead, ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.engine.core import EngineCore
from weft.engine.replicas import Replicas
from weft.types.messages import HeadStats, Submit, TokenEvent

log = get_logger(__name__)

Sink: TypeAlias = Callable[[TokenEvent], None]
_Command: TypeAlias = Callable[[], None]

AWAITING_POLL_S = 0.02
"""Seconds of one wait for a command while sequences await something: it is noticed so late that it came."""


class EngineThread:
    """Runs an EngineCore. Its methods may be called from any thread and do not wait for the engine."""

    def __init__(self, core: EngineCore | Replicas) -> None:
        self._core = core
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._lock = threading.Lock()
        """Guards ``_death``: no command is queued after the thread took its last."""
        self._death: ErrorInfo | None = None
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._thread.start()

    @property
    def death(self) -> ErrorInfo | None:
        """Why the engine can't answer any more; None while it can."""
        return self._death

    @property
    def rounds(self) -> int:
        """How often the thread went round its loop: it grows unless the thread waits for work, or hangs."""
        return self._rounds

    def give_up(self, message: str) -> None:
        """Declares the engine dead although its thread does not answer. Later calls are refused."""
        with self._lock:
            if self._death is None:
                self._death = EngineDead(message).info()

    def submit(self, submits: Sequence[Submit], sink: Sink) -> None:
        """Starts the sequences of one request. Each of them will end with one terminal event to ``sink``.

        A refusal (queue full, for example) is such an event, too.
        """
        if not self._post(lambda: self._submit(submits, sink)):
            self._refuse(submits, sink)

    def finish(self, sequences: Sequence[int]) -> None:
        """Ends sequences wherever they are. Unknown ones are fine. Their sinks hear no more of them."""
        self._post(lambda: self._finish(sequences))

    def stats(self, sink: Callable[[HeadStats], None]) -> bool:
        """Sends the engine's counters to ``sink``; False when it is dead."""
        return self._post(lambda: sink(self._core.stats()))

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the thread and closes the engine; what runs gets EngineDead. Waits ``timeout`` s at most."""
        with self._lock:
            self._commands.put(None)
        self._thread.join(timeout)

    def _post(self, command: _Command) -> bool:
        with self._lock:
            if self._death is not None:
                return False
            self._commands.put(command)
            return True

    def _run(self) -> None:
        error = EngineDead("the engine was shut down")
        try:
            while self._obey():
                self._rounds += 1
                for event in self._core.hear():
                    self._deliver(event)
                if self._core.has_work():
                    for event in self._core.step():
                        self._deliver(event)
        except WeftError as raised:
            error = EngineDead(raised.message)
            log.error("the engine died: %s", raised.message)
        except Exception as raised:
            error = EngineDead(f"the engine failed: {type(raised).__name__}")
            log.exception("the engine died")
        self._die(error.info())

    def _obey(self) -> bool:
        """Carries out what is queued, waiting for a command if there is nothing to compute. False: stop."""
        wait = not self._core.has_work()
        patience = AWAITING_POLL_S if self._core.awaiting else None
        while True:
            try:
                command = self._commands.get(block=wait, timeout=patience)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _die(self, error: ErrorInfo) -> None:
        with self._lock:
            self._death = error = self._death or error
        while True:  # commands that came before: their sequences must hear of the end, too
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                self._attempt(command)
        for sequence in list(self._sinks):
            self._deliver(TokenEvent(sequence=sequence, finish="error", error=error))
        self._attempt(self._core.close)

    def _attempt(self, command: _Command) -> None:
        """Carries out a command of a dead engine: nothing may keep the others from hearing of the end."""
        try:
            command()
        except Exception as error:
            log.error("after the engine's end: %s", error)

    def _submit(self, submits: Sequence[Submit], sink: Sink) -> None:
        if self._death is not None:
            self._refuse(submits, sink)
            return
        for number, submit in enumerate(submits):
            self._sinks[submit.sequence] = sink
            try:
                for event in self._core.submit(submit):
                    self._deliver(event)
            except WeftError as error:
                # the request is refused as a whole; its first choices must not run on
                for begun in submits[: number + 1]:
                    self._core.finish(begun.sequence)
                for refused in submits:
                    self._sinks[refused.sequence] = sink
                    self._deliver(TokenEvent(sequence=refused.sequence, finish="error", error=error.info()))
                return

    def _refuse(self, submits: Sequence[Submit], sink: Sink) -> None:
        for submit in submits:
            sink(TokenEvent(sequence=submit.sequence, finish="error", error=self._death))

    def _finish(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._sinks.pop(sequence, None)
            if self._death is None:
                self._core.finish(sequence)

    def _deliver(self, event: TokenEvent) -> None:
        sink = self._sinks.get(event.sequence)
        if sink is None:
            return
        if event.finish is not None:
            del self._sinks[event.sequence]
        sink(event)
