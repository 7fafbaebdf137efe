"""The processes of a server with several API servers. This module carries out the decisions of
``weft.control.processes.supervisor``.

supervisor ──starts, watches► engines ◄──zmq── front 0, front 1, ..
    │ registry (a file) ─────read by────────────►│
    │ channel: drain, stop, verdict ────────────►│
    │◄── ready, alive, this engine is lost, command

A front is an API server.
"""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from weft.common import signals
from weft.common.clock import SystemClock
from weft.common.errors import ReportedError
from weft.common.log import get_logger
from weft.control.links.link import Address
from weft.control.links.shutdown import shut_down
from weft.control.processes import channel, commands, process_registry
from weft.control.processes import supervisor as s
from weft.control.processes.engine_owner import Probes, Starter
from weft.control.processes.model_loads import ModelLoads
from weft.control.processes.rolling import Quit, Settings, Switch
from weft.control.processes.table import Forget, Kill, ProcessState, Start

log = get_logger(__name__)

TURN_S = 0.1
"""Maximum seconds between two checks of all processes."""

StartFront = Callable[[str, int, socket.socket], "subprocess.Popen[bytes]"]
"""Start an API server process, without a wait for readiness.

Arguments: name, incarnation, and the child's end of the channel.
"""


class ClusterServer:
    """Run a ``Supervisor``. Use from the main thread: all processes end with the calling thread."""

    def __init__(
        self,
        supervisor: s.Supervisor,
        engines: Starter,
        start_front: StartFront,
        folder: Path,
        announce: Callable[[], None],
        *,
        secret: str | None = None,
        on_switch: Callable[[], None] = lambda: None,
        models: ModelLoads | None = None,
    ) -> None:
        """Set up the server; start nothing.

        ``folder``: folder of the registry. ``announce`` is called once all API servers answer requests.
        ``secret``: path of the file with the group's secret, if engines may run on other hosts. ``on_switch``
        carries out `Switch`. ``models``: of a server of several models, which has no other engines.
        """
        self._models = models
        if models is not None:
            models.expel = self._expel
        self._supervisor = supervisor
        self._engines = engines
        self._start_front = start_front
        self._folder = folder
        self._announce = announce
        self._secret = secret
        self._clock = SystemClock()
        self._addresses: dict[str, Address] = {}
        self._fronts: dict[str, tuple[int, subprocess.Popen[bytes], socket.socket]] = {}
        """Name -> incarnation, process and channel of each API server."""
        self._selector = selectors.DefaultSelector()
        self._signals: deque[int] = deque()
        self._asked = self._switch_asked = False
        """True while a requested rolling restart, or a requested switch, is not handled yet."""
        self._on_switch = on_switch
        self._probes = Probes()
        self._verdicts: list[tuple[str, int, channel.Verdict]] = []
        """Name and incarnation of an API server, and a verdict to send after the next registry."""
        self._preparing: tuple[str, int, channel.Command, Future[None]] | None = None
        """Name and incarnation of an API server, and its command, whose settings a thread prepares."""
        self._published: process_registry.ProcessRegistry | None = None
        self._status: int | None = None

    def run(self) -> int:
        """Serve until a stop signal, or until no request can be served any more. Return the exit status.

        On return, engines have the order to stop, unless the status is above 128. Set the handlers of
        ``signals.STOPS``, and leave these signals ignored.
        """
        signal.signal(signals.RESTART, lambda *_: self._ask())
        try:
            with signals.acting(self._signals.append):
                self._start()
                while self._status is None:
                    self._turn()
                return self._status
        finally:
            self._end()

    def _ask(self) -> None:
        """Request a rolling restart, from a signal handler."""
        self._asked = True

    def switch(self) -> None:
        """Request a replacement of all engines at an idle moment: see ``RollingRestart``.

        Safe from any thread.
        """
        self._switch_asked = True

    def _start(self) -> None:
        """Start the engines, write the registry, then start the API servers."""
        if self._models is not None:
            self._models.start()
        actions = self._supervisor.start(self._clock.now())
        engines = [one for one in actions if isinstance(one, Start) and one.role == "head"]
        self._carry_out(engines)
        self._publish()  # API servers read the registry at start
        self._carry_out([one for one in actions if one not in engines])

    def _turn(self) -> None:
        """Run one round, of up to ``TURN_S`` seconds: read messages, pass events to the supervisor, write the
        registry. Sets ``_status`` at the end of the server.
        """
        ready = self._selector.select(TURN_S)
        for key, _ in ready:
            name, incarnation = key.data
            self._read_front(name, incarnation, key.fileobj)
        # Signal handlers only append to the queue. The supervisor runs in this thread alone.
        while self._signals:
            self._on(s.Signalled(self._signals.popleft()))
        for name, (incarnation, process, _) in list(self._fronts.items()):
            if (status := process.poll()) is not None:
                self._front_left(name, incarnation)
                self._on(s.ProcessEnded("front", name, incarnation, status))
        for name, address in list(self._addresses.items()):
            if (status := address.process.poll()) is not None:
                self._on(s.ProcessEnded("head", name, address.incarnation, status))
        if self._asked:
            self._asked = False
            self._on(s.RestartAsked())
            if self._models is not None:
                self._models.restart()
        if self._switch_asked:
            self._switch_asked = False
            self._on(s.SwitchAsked())
        for name, incarnation, idle in self._probes.look(self._supervisor.rolling.watched, self._addresses):
            self._on(s.EngineSeen(name, incarnation, idle))
        self._go_on()
        self._on(s.SupervisorTick())
        if self._models is not None:
            if self._supervisor.phase is s.ServerPhase.DRAINING:
                self._models.drain()
            self._models.turn()
        self._publish()
        self._answer()

    def _read_front(self, name: str, incarnation: int, link: object) -> None:
        """Turn the messages of an API server into events.

        Stop reading after the end of the stream. An invalid message is logged and counts as the end of the
        stream.
        """
        assert isinstance(link, socket.socket)
        try:
            messages = channel.receive(link)
        except msgspec.MsgspecError:
            log.error("API server %s sent an invalid message", name)
            messages = None
        # The process status reports the end of the API server, so the closed channel is no event.
        if messages is None:
            self._selector.unregister(link)
        for message in messages or ():
            if isinstance(message, channel.FrontReady):
                self._on(s.FrontIsReady(name, incarnation))
            elif isinstance(message, channel.FrontAlive):
                self._on(s.FrontIsAlive(name, incarnation, message.kept))
            elif isinstance(message, channel.DrainAsked):
                self._signals.append(signal.SIGTERM)
            elif self._models is not None:
                self._of_models(self._models, name, incarnation, message)
            elif isinstance(message, channel.Command):
                self._command(name, incarnation, message)
            elif isinstance(message, channel.EngineLost):
                self._on(s.FrontLostEngine(message.name, message.incarnation, ReportedError(message.error)))

    def _of_models(self, models: ModelLoads, name: str, incarnation: int, message: channel.FromFront) -> None:
        """Handle a message to a server of several models."""
        if isinstance(message, channel.EngineLost):
            models.lost(message)
        elif isinstance(message, channel.Command | channel.ModelAsked):
            self._verdicts.append((name, incarnation, models.command(message)))
            models.renew()
        elif isinstance(message, channel.OfModels):
            models.report(_member(name, incarnation), message)

    def _front_left(self, name: str, incarnation: int) -> None:
        """Close the requests of an API server whose process has ended."""
        if self._models is not None:
            # The last reports of the process must not arrive after its end.
            self._models.left(_member(name, incarnation))

    def _expel(self, front: str) -> None:
        """Replace an API server that does not answer."""
        name, _, incarnation = front.rpartition("/")
        self._on(s.FrontIsLost(name, int(incarnation)))

    def _command(
        self, name: str, incarnation: int, asked: channel.Command, prepared: Future[None] | None = None
    ) -> None:
        """Carry out a command of an API server, or begin to prepare its new settings."""
        done: channel.Verdict | commands.Prepares
        if self._preparing is not None and isinstance(asked, channel.GroupRestarted) and asked.topology:
            done = commands.refuse(asked)
        else:
            done = commands.carry_out(asked, self._supervisor, self._engines, self._on, prepared)
        if isinstance(done, commands.Prepares):
            self._preparing = name, incarnation, asked, done.done
        else:
            self._verdicts.append((name, incarnation, done))

    def _go_on(self) -> None:
        """Carry out the command whose settings a thread has prepared, if any."""
        if self._preparing is not None and self._preparing[3].done():
            prepared, self._preparing = self._preparing, None
            self._command(*prepared)

    def _answer(self) -> None:
        """Send all verdicts. An API server that has ended since gets none."""
        for name, incarnation, verdict in self._verdicts:
            present, _, link = self._fronts.get(name, (None, None, None))
            if link is not None and present == incarnation:
                channel.answer(link, verdict)
        self._verdicts.clear()

    def _on(self, event: s.Event) -> None:
        """Pass an event to the supervisor and carry out the resulting actions."""
        self._carry_out(self._supervisor.on(event, self._clock.now()))

    def _carry_out(self, actions: Sequence[s.Action]) -> None:
        """Carry out each action in order. ``Exit`` only sets ``_status``."""
        for action in actions:
            # Order matters: the patterns for role "head" come before the patterns for any role.
            match action:
                case Start("head", name, incarnation):
                    self._start_engine(name, incarnation)
                case Kill("head", name, incarnation):
                    self._engines.kill(name, incarnation)
                case Start(_, name, incarnation):
                    self._run_front(name, incarnation)
                case Kill(_, name, _):
                    self._end_front(name)
                case Forget("head", name):
                    self._addresses.pop(name, None)
                    self._engines.forget(name)
                case Switch():
                    self._on_switch()
                case Settings(names, new):
                    self._engines.use(names, new)
                case Quit(name, _):
                    self._probes.quit(name)
                case s.Tell(name, order):
                    channel.tell(self._fronts[name][2], order)
                case s.Announce():
                    self._announce()
                case s.Exit(status):
                    self._status = status

    def _start_engine(self, name: str, incarnation: int) -> None:
        """Start an engine and store its address.

        A failed start is logged and counts as the end of the process.
        """
        try:
            self._addresses[name] = self._engines.start(name, incarnation)
        except OSError as error:  # no memory, or no process slots
            log.error("engine %s cannot be started: %s", name, error)
            self._on(s.ProcessEnded("head", name, incarnation, 1))

    def _run_front(self, name: str, incarnation: int) -> None:
        """Start an API server with a new channel and read its channel from now on.

        Raise OSError if the process cannot be started.
        """
        ours, theirs = channel.channel()
        with theirs:
            process = self._start_front(name, incarnation, theirs)
        self._fronts[name] = incarnation, process, ours
        self._selector.register(ours, selectors.EVENT_READ, (name, incarnation))

    def _end_front(self, name: str) -> None:
        """Remove an API server from ``_fronts``, close the channel and kill the process.

        Wait up to 30 s for the end. Raises subprocess.TimeoutExpired after the wait.
        """
        incarnation, process, link = self._fronts.pop(name)
        if link in self._selector.get_map():
            self._selector.unregister(link)
        link.close()
        process.kill()
        process.wait(30.0)
        self._front_left(name, incarnation)

    def _publish(self) -> None:
        """Write the registry if its content has changed.

        A failed write is logged and tried again in the next round.
        """
        models = None if self._models is None else self._models.record()
        processes = (*self._engine_records(), *self._front_records())
        found = process_registry.ProcessRegistry(processes, models, self._supervisor.carrier)
        if found != self._published:
            try:
                process_registry.write(self._folder, found)
            except OSError as error:  # for example a full disk; the next round tries again
                log.error("the process registry cannot be written: %s", error)
            else:
                self._published = found

    def _engine_records(self) -> list[process_registry.ProcessRecord]:
        """Return the registry entries of all started engines."""
        made = [] if self._models is None else self._models.engine_records()
        for name, entry in self._supervisor.engines.entries.items():
            made.append(
                process_registry.record_of_engine(name, entry, self._addresses.get(name), self._secret)
            )
        return made

    def _front_records(self) -> list[process_registry.ProcessRecord]:
        """Return the registry entries of all API servers."""
        return [
            process_registry.ProcessRecord(
                role="front",
                name=name,
                incarnation=entry.incarnation,
                state=entry.state.value,
                pid=self._fronts[name][1].pid if name in self._fronts else None,
            )
            for name, entry in self._supervisor.fronts.entries.items()
        ]

    def _end(self) -> None:
        """Kill all API servers, close all probes and order the running engines to stop.

        Engines get no order after a signal during the start, or a second signal.
        """
        for name in list(self._fronts):
            self._end_front(name)
        self._selector.close()
        self._probes.close()
        # After a signal during the start, or a second signal, engines are not asked: they end with this
        # process.
        if self._status is not None and self._status <= 128:
            running = [
                n for n, e in self._supervisor.engines.entries.items() if e.state is ProcessState.RUNNING
            ]
            of_models = [] if self._models is None else self._models.addresses()
            shut_down([*(self._addresses[name] for name in running), *of_models])


def _member(name: str, incarnation: int) -> str:
    """Return the name of an API server's process for the table of models."""
    return f"{name}/{incarnation}"
