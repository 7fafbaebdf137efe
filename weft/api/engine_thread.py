"""An engine in its own thread, for callers on an event loop.

The thread owns the engine. Commands reach the thread through a queue. Events go to the sink of each sequence,
and sinks are called in the thread. Every sink gets a terminal event, even if the engine dies.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from weft.common.errors import EngineDead, ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.engine.core import EngineCore
from weft.engine.server.replicas import Replicas
from weft.types.messages import EngineStats, Submit, TokenEvent

log = get_logger(__name__)

Sink: TypeAlias = Callable[[TokenEvent], None]
_Command: TypeAlias = Callable[[], None]

BLOCKED_POLL_S = 0.02
"""Maximum seconds of one wait for a command while sequences are blocked. Bounds the delay of new input."""


class EngineThread:
    """Run an EngineCore in a thread.

    All methods except ``stop`` return without a wait. Safe from any thread.
    """

    def __init__(self, core: EngineCore | Replicas) -> None:
        """Start the thread, which owns ``core`` from now on."""
        self._core = core
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._lock = threading.Lock()
        """Guards ``_death``: no command is queued after the last command was taken."""
        self._death: ErrorInfo | None = None
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._thread.start()

    @property
    def death(self) -> ErrorInfo | None:
        """Reason of the engine's death; None while the engine runs."""
        return self._death

    @property
    def rounds(self) -> int:
        """Number of rounds of the thread's loop.

        The number stands still while the thread waits for work, or hangs.
        """
        return self._rounds

    def give_up(self, message: str) -> None:
        """Declare a hung engine dead. Later calls are refused; running sequences get their terminal event
        only if the thread goes on. No effect on a dead engine."""
        with self._lock:
            if self._death is None:
                self._death = EngineDead(message).info()

    def submit(self, submits: Sequence[Submit], sink: Sink) -> None:
        """Start the sequences of one request. Send their events to ``sink``, the last of each sequence
        terminal, unless ``finish`` is called.

        A refusal (queue full, or a dead engine) is a terminal event too; nothing is raised. If the engine
        is dead, ``sink`` is called in the caller's thread.
        """
        if not self._post(lambda: self._submit(submits, sink)):
            self._refuse(submits, sink)

    def finish(self, sequences: Sequence[int]) -> None:
        """End sequences in any state; ignore unknown ids. Their sinks get no more events once the thread
        has taken the command."""
        self._post(lambda: self._finish(sequences))

    def stats(self, sink: Callable[[EngineStats], None]) -> bool:
        """Request the engine's counters; the thread passes them to ``sink`` later. Return False, without a
        call of ``sink``, if the engine is dead."""
        return self._post(lambda: sink(self._core.stats()))

    def stop(self, timeout: float = 30.0) -> None:
        """End the thread and close the engine.

        Running sequences get EngineDead. Block for ``timeout`` seconds at most; a thread that still runs
        then is left alone. Idempotent.
        """
        with self._lock:
            self._commands.put(None)
        self._thread.join(timeout)

    def _post(self, command: _Command) -> bool:
        """Queue a command. Return False if the engine is dead."""
        with self._lock:
            if self._death is not None:
                return False
            self._commands.put(command)
            return True

    def _run(self) -> None:
        """Run the engine loop, in the thread, until a stop or a failure; then end all sequences and close
        the engine. Failures are logged, not raised."""
        error = EngineDead("the engine was shut down")
        try:
            while self._obey():
                self._rounds += 1
                for event in self._core.poll():
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
        """Carry out all queued commands; wait for a command if there is nothing to compute.

        Return False on a stop.
        """
        wait = not self._core.has_work()
        patience = BLOCKED_POLL_S if self._core.blocked else None
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
        """Record the death, run the remaining commands and end every sequence with ``error``."""
        with self._lock:
            self._death = error = self._death or error
        # Commands queued before the death: the submitted sequences need a terminal event too.
        while True:
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
        """Run a command of a dead engine and log any exception.

        No exception may stop the other notifications.
        """
        try:
            command()
        except Exception as error:
            log.error("a command after the engine's end failed: %s", error)

    def _submit(self, submits: Sequence[Submit], sink: Sink) -> None:
        """Submit the sequences of a request, in the thread. If the engine refuses a sequence, end all
        sequences of the request with the error."""
        if self._death is not None:
            self._refuse(submits, sink)
            return
        for number, submit in enumerate(submits):
            self._sinks[submit.sequence] = sink
            try:
                for event in self._core.submit(submit):
                    self._deliver(event)
            except WeftError as error:
                # The engine refuses the request as a whole, so sequences submitted before the refusal must
                # end too.
                for begun in submits[: number + 1]:
                    self._core.finish(begun.sequence)
                for refused in submits:
                    self._sinks[refused.sequence] = sink
                    self._deliver(TokenEvent(sequence=refused.sequence, finish="error", error=error.info()))
                return

    def _refuse(self, submits: Sequence[Submit], sink: Sink) -> None:
        """Send a terminal event with the engine's death for each sequence."""
        for submit in submits:
            sink(TokenEvent(sequence=submit.sequence, finish="error", error=self._death))

    def _finish(self, sequences: Sequence[int]) -> None:
        """Remove the sinks and end the sequences, in the thread."""
        for sequence in sequences:
            self._sinks.pop(sequence, None)
            if self._death is None:
                self._core.finish(sequence)

    def _deliver(self, event: TokenEvent) -> None:
        """Pass an event to the sink of its sequence. A terminal event removes the sink."""
        sink = self._sinks.get(event.sequence)
        if sink is None:
            return
        if event.finish is not None:
            del self._sinks[event.sequence]
        sink(event)
