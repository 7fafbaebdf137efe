"""The engines of all models of a server with several API servers: carries out the decisions of
``weft.control.model_fronts`` in the supervisor's process.

Each load starts new engines with an ``EngineOwner`` of their own. The registry lists the engines with model
and load, so API servers of a later load never reach engines of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from weft.common.clock import SystemClock
from weft.common.errors import EngineDead, InvalidRequest, NotFound, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.control import model_fronts as f
from weft.control import models as m
from weft.control.links.link import Address
from weft.control.links.owner import Scaled
from weft.control.links.shutdown import shut_down
from weft.control.processes import channel
from weft.control.processes.commands import in_thread
from weft.control.processes.engine_owner import EngineOwner
from weft.control.processes.process_registry import ProcessRecord, record_of_engine

log = get_logger(__name__)

CLOSE_S = 2.0
"""Maximum seconds in which API servers close their connections before the processes end. Only log lines
depend on this time."""
COUNTS_S = 0.2
"""Minimum seconds between two records that differ in counts alone."""


class LoadProcesses(Protocol):
    """Starts and ends the engine processes of one model."""

    def start(self) -> EngineOwner:
        """Start all processes, and return their owner. Raises OSError."""

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the processes, which have an order to end, and kill the rest. Blocks.
        Idempotent."""


class _End:
    """The end of the processes of one load."""

    def __init__(self, version: int, until: float, event: m.Event, order: bool) -> None:
        """``version``: the processes end when all members have seen the version, or at ``until``. ``event``:
        for the table, after the end. ``order``: True to order the engines to end before they are killed."""
        self.version, self.until, self.event, self.order = version, until, event, order
        self.done: Future[None] | None = None


class ModelLoads:
    """Runs a ``SharedTable``. Use from the main thread: all processes end with the calling thread."""

    def __init__(self, table: f.SharedTable, processes: Mapping[str, LoadProcesses]) -> None:
        """``processes``: by name of the model."""
        self.table = table
        self._processes = processes
        self.expel: Callable[[str], None] = lambda front: None
        """Ends the process of an API server. Set by the owner of the processes."""
        self._clock = SystemClock()
        self._owners: dict[str, EngineOwner] = {}
        """Owner of the present load of each model."""
        self._ends: dict[str, _End] = {}
        self._record: tuple[float, f.ModelsRecord] | None = None
        """Time and content of the last record."""
        self._draining = False

    def start(self) -> None:
        """Start the models that load at the start of the server."""
        self._carry_out(self.table.start(self._clock.now()))

    # -- messages and time

    def report(self, front: str, message: channel.OfModels) -> None:
        """Handle a report of an API server."""
        match message:
            case channel.FrontJoins():
                self._on(f.Joined(front))
            case channel.ModelsUsed(seen, uses):
                self._on(f.Reported(front, seen, uses))
            case channel.ModelReady(load, cost, error):
                reason = None if error is None else ReportedError(error)
                self._on(f.LoadSeen(load.model, load.number, cost, reason))

    def left(self, front: str) -> None:
        """Note the end of the process of an API server. Idempotent."""
        self._on(f.Left(front))

    def lost(self, lost: channel.EngineLost) -> None:
        """Replace an engine that an API server has lost. Reports about earlier loads are dropped."""
        owner = self._owner_of(lost.load)
        if owner is not None:
            owner.replace(lost.name, lost.incarnation, ReportedError(lost.error))

    def command(self, asked: channel.Command | channel.ModelAsked) -> channel.Verdict:
        """Carry out a command of an operator and return the verdict. A refused command changes nothing."""
        try:
            if self._draining:
                raise Unavailable("the server is shutting down")
            changes = self._operate(asked) if isinstance(asked, channel.ModelAsked) else self._groups(asked)
            return channel.Verdict(asked.request, changes)
        except WeftError as error:
            log.info("a command of an operator is refused: %s", error.message)
            return channel.Verdict(asked.request, error=error.info())
        except OSError as error:  # for example a full disk
            refusal = Unavailable(f"the groups stay as they are: {error.strerror}")
            return channel.Verdict(asked.request, error=refusal.info())

    def _operate(self, asked: channel.ModelAsked) -> Scaled:
        name = asked.model
        if name not in self.table.entries:
            raise NotFound(f"there is no model {name}")
        events: dict[str, m.Event] = {
            "load": m.LoadAsked(name),
            "unload": m.UnloadAsked(name),
            "pin": m.PinAsked(name, True),
            "unpin": m.PinAsked(name, False),
            "keep": m.Kept(name, asked.seconds),
        }
        self._on(events[asked.what])
        return Scaled()

    def _groups(self, asked: channel.Command) -> Scaled:
        """Change the groups of a load. Raise WeftError or OSError before the first change."""
        owner = self._owner_of(asked.load)
        if owner is None:
            raise Unavailable(f"the model {asked.load.model} is not loaded")
        match asked:
            case channel.GroupsScaled(base, groups):
                scaled: Scaled = _now(owner.scale(base, groups))
                return scaled
            case channel.GroupRemoved(name):
                return Scaled(leaving=tuple(_now(owner.remove(name))))
            case channel.GroupRevived(name):
                return Scaled(tuple(_now(owner.revive(name))))
            case channel.GroupRestarted(name, _, topology):
                if topology:
                    raise InvalidRequest(
                        "a server of several models with --fronts above 1 takes no new settings at run time",
                        param="topology",
                    )
                return Scaled(tuple(_now(owner.restart(name))))

    def restart(self) -> None:
        """Replace the engines of all loaded models in turn."""
        for owner in self._owners.values():
            owner.ask_restart()

    def drain(self) -> None:
        """Note that the server drains. Idempotent."""
        if not self._draining:
            self._draining = True
            for owner in self._owners.values():
                owner.drain()

    def turn(self) -> None:
        """Look at all processes, and report the time. Call several times per second."""
        for name, owner in list(self._owners.items()):
            if name in self._ends:
                continue
            self._look(name, owner)
            owner.present(self.table.kept(name))
        for name, end in list(self._ends.items()):
            self._end(name, end)
        self._on(m.Tick())

    def _look(self, name: str, owner: EngineOwner) -> None:
        """Handle the ends of engine processes."""
        for engine, incarnation, status in owner.ended():
            log.error("engine %s of the model %s ended with status %d", engine, name, status)
            error = EngineDead(f"the engine {engine} ended with status {status}")
            if self.table.entries[name].state is m.ModelState.LOADING:
                # A failure during a load is not retried. Most such failures are errors of the configuration.
                self._on(f.LoadSeen(name, self.table.loads[name], error=error))
                return
            owner.replace(engine, incarnation, error)
        # No API server may be connected now, so the owner itself reports the loss.
        if (failure := owner.failure) is not None:
            self._on(f.LoadSeen(name, self.table.loads[name], error=failure, lost=True))

    def _owner_of(self, load: channel.Load) -> EngineOwner | None:
        if self.table.loads.get(load.model) != load.number or load.model in self._ends:
            return None
        return self._owners.get(load.model)

    # -- actions

    def _on(self, event: f.SharedEvent) -> None:
        self._carry_out(self.table.on(event, self._clock.now()))

    def _carry_out(self, actions: list[f.SharedAction]) -> None:
        for action in actions:
            match action:
                case m.Load(name):
                    self._load(name)
                case m.Unload(name):
                    self._begin_end(name, m.Gone(name), order=True)
                case f.Drop(name, error):
                    log.error("the model %s could not be loaded: %s", name, error.message)
                    failed = Unavailable(f"the model {name} cannot be used now: {error.message}")
                    self._begin_end(name, m.Failed(name, failed), order=False)
                case f.Expel(front):
                    log.error("API server %s does not answer for %g s: it is replaced", front, f.LEASE_S)
                    self.expel(front)

    def _load(self, name: str) -> None:
        log.info("loading the model %s", name)
        try:
            self._owners[name] = self._processes[name].start()
        except Exception as error:
            # No memory, or no process slots. Any other error must not end the server either.
            if not isinstance(error, (WeftError, OSError)):
                log.exception("unexpected error in the load of the model %s", name)
            self._on(f.LoadSeen(name, self.table.loads[name], error=Unavailable(str(error))))

    def _begin_end(self, name: str, event: m.Event, *, order: bool) -> None:
        self._ends[name] = _End(self.table.version, self._clock.now() + CLOSE_S, event, order)

    def _end(self, name: str, end: _End) -> None:
        """Advance the end of a load: wait for the members, end the processes in a thread, tell the table."""
        if end.done is None:
            if self.table.seen(end.version) or self._clock.now() >= end.until:
                owner = self._owners.pop(name, None)
                addresses = [] if owner is None or not end.order else owner.addresses
                seconds = m.END_S if end.order else 0.0
                end.done = in_thread(partial(_close, self._processes[name], addresses, seconds))
        elif end.done.done():
            if (error := end.done.exception()) is not None:
                log.error("unexpected error in the unload of the model %s: %s", name, error)
            del self._ends[name]
            if end.order:
                log.info("the model %s is unloaded", name)
            self._on(end.event)

    # -- the registry

    def record(self) -> f.ModelsRecord:
        """Return the state of all models for API servers."""
        now = self._clock.now()
        if self._record is not None:
            at, last = self._record
            if last.version == self.table.version and now < at + COUNTS_S:
                return last
        found = self.table.record()
        self._record = now, found
        return found

    def renew(self) -> None:
        """Make the next record with the present counts."""
        self._record = None

    def engine_records(self) -> list[ProcessRecord]:
        """Return the registry entries of the engines of all loads."""
        return [
            record_of_engine(name, entry, address, model=model, load=self.table.loads[model])
            for model, owner in self._owners.items()
            for name, entry, address in owner.entries
        ]

    def addresses(self) -> list[Address]:
        """Return the addresses of all engines, for the order to end."""
        return [address for owner in self._owners.values() for address in owner.addresses]


def _close(processes: LoadProcesses, addresses: list[Address], seconds: float) -> None:
    """Order engines to end, and wait for the end of the processes."""
    shut_down(addresses)
    processes.close(seconds)


def _now(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that does not wait, or raise its exception."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise AssertionError("the command waits")
