"""The owner of the engine processes in a server with one API server. The owner replaces lost engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from weft.common.clock import SystemClock
from weft.common.errors import EngineDead, Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.links.link import Address
from weft.control.links.owner import EngineInfo, Scaled
from weft.control.links.probe import EngineProbe
from weft.control.processes.rolling import BUSY, RENEWS, Quit, RollingRestart, Settings, Switch
from weft.control.processes.rolling import Action as Step
from weft.control.processes.scaling import plan_removal, plan_restart, plan_scale, to_revive
from weft.control.processes.table import Forget, Member, ProcessEntry, ProcessState, ProcessTable, Start

log = get_logger(__name__)


class Starter(Protocol):
    """Start and end engine processes. The implementation is
    ``weft.engine.server.engine_processes.EngineProcesses``."""

    def add(self, groups: Sequence[str], like: str) -> None:
        """Prepare new groups with the settings of group ``like``, which may have left the server.

        Raise Unavailable without a place.
        """

    def prepare(self, topology: str, names: Collection[str]) -> None:
        """Resolve the settings of the groups of ``names`` in a topology, for ``use``. Change nothing yet.

        Raise InvalidRequest for a wrong topology, and for settings that a restart cannot change.
        """

    def use(self, names: Collection[str], new: bool) -> None:
        """Start all later processes of ``names`` with the prepared settings, or with the former ones."""

    def start(self, name: str, incarnation: int) -> Address:
        """Start the process and return its address, without a wait for readiness."""

    def kill(self, name: str, incarnation: int) -> None:
        """Kill the process and its children at once. The process may have ended already."""

    def forget(self, name: str) -> None:
        """Release everything that is kept for an engine that has left the server."""


class EngineOwner:
    """Implementation of ``weft.control.links.owner.Owner``.

    Create the owner in a thread that lives as long as the engines: see ``EngineProcesses``.
    """

    shared = False
    elastic = False

    def __init__(
        self,
        names: Iterable[str] | Mapping[str, Member],
        starter: Starter,
        restarts: int,
        *,
        serves: Callable[[set[str]], bool] = bool,
        drain_timeout: float = 30.0,
        on_switch: Callable[[], None] = lambda: None,
    ) -> None:
        """Build the process table; start nothing.

        ``restarts`` and ``serves``: see ``ProcessTable``. ``drain_timeout``: see ``RollingRestart``.
        ``on_switch`` carries out `Switch`.
        """
        self._table = ProcessTable("head", names, restarts, serves)
        self._rolling = RollingRestart(self._table, drain_timeout)
        self._probes = Probes()
        self._starter = starter
        self._clock = SystemClock()
        self._addresses: dict[str, Address] = {}
        self._asked = self._switch_asked = self._draining = self._preparing = False
        self._on_switch = on_switch

    def start(self) -> None:
        """Start every engine process without a wait for readiness."""
        self._carry_out(self._table.start(self._clock.now()))

    def ask_restart(self) -> None:
        """Request a rolling restart: engines finish their work and are replaced in turn.

        Safe in a signal handler.
        """
        self._asked = True

    async def restart(self, name: str = "", topology: str = "") -> list[str]:
        """Begin a rolling restart: see ``weft.control.links.owner.Owner``."""
        self._check_open()
        table = self._table
        names = plan_restart(name, table.members, table.leaving | table.retired)
        if topology:
            await self._prepare(topology, names)
        self._rolling.begin(names if name else (), bool(topology))
        return names

    async def _prepare(self, topology: str, names: list[str]) -> None:
        """Prepare new settings in a thread. Raise Unavailable if another restart begins meanwhile."""
        if self._rolling.active or self._preparing:
            raise Unavailable(BUSY)
        self._preparing = True
        try:
            await asyncio.to_thread(self._starter.prepare, topology, names)
        finally:
            self._preparing = False
        self._check_open()
        if self._rolling.active:
            raise Unavailable(BUSY)

    def describe(self) -> list[EngineInfo]:
        """Return all members: see ``weft.control.links.owner.Owner``."""
        return [
            EngineInfo(
                name,
                one.member.group,
                one.member.base,
                one.member.role,
                one.condition,
                one.incarnation,
                "" if one.error is None else one.error.message,
            )
            for name, one in self._table.entries.items()
        ]

    def switch(self) -> None:
        """Request a replacement of all engines at an idle moment: see ``RollingRestart``.

        Safe from any thread.
        """
        self._switch_asked = True

    def drain(self) -> None:
        """Stop rolling restarts because the server drains: engines that drain take work again. From now on
        only dead engines, and engines with the order to quit, are replaced."""
        self._draining = True
        self._rolling.end()

    def present(self, kept: int = 0) -> Mapping[str, Address | WeftError | None]:
        """Return, by name, the address of the present process, the error if the engine is retired, or None
        before the first process.

        The caller polls this method. Each call also advances restarts and starts processes with a due time in
        the past.
        """
        self._rolling.keeps("", kept)
        self._turn()
        present: dict[str, Address | WeftError | None] = {}
        for name, entry in self._table.entries.items():
            if entry.state is ProcessState.RETIRED and entry.error is not None:
                present[name] = entry.error
            # A waiting name keeps its last address: the link then finds the process ended.
            elif name in self._addresses:
                address = self._addresses[name]
                present[name] = address._replace(draining=entry.draining, leaving=entry.leaving)
            else:
                present[name] = None
        return present

    def replace(self, name: str, incarnation: int, error: WeftError) -> None:
        """Replace an engine process after a loss report from the API server."""
        self._carry_out(self._table.lose(name, incarnation, error, self._clock.now()))

    @property
    def addresses(self) -> list[Address]:
        """Addresses of the last process of each engine."""
        return list(self._addresses.values())

    @property
    def entries(self) -> list[tuple[str, ProcessEntry, Address | None]]:
        """Name, state and address of each engine, in order."""
        return [(name, entry, self._addresses.get(name)) for name, entry in self._table.entries.items()]

    @property
    def failure(self) -> WeftError | None:
        """Reason why no engine is left for good; None while an engine runs or waits for a restart."""
        if not self._table.over:
            return None
        errors = [entry.error for entry in self._table.entries.values() if entry.error is not None]
        return errors[-1] if errors else EngineDead("all engines have ended")

    def ended(self) -> list[tuple[str, int, int]]:
        """Return (name, incarnation, exit status) of each running engine whose process has ended.

        For an owner whose API servers are other processes: an API server in this process sees the end by its
        links.
        """
        return [
            (name, address.incarnation, status)
            for name, address in self._addresses.items()
            if self._table.running(name, address.incarnation) is not None
            and (status := address.process.poll()) is not None
        ]

    async def scale(self, base: str, groups: int) -> Scaled:
        """Change the number of groups: see ``weft.control.links.owner.Owner``."""
        self._check_open()
        table = self._table
        change = plan_scale(
            base,
            groups,
            *(table.members, table.leaving, table.retired, table.serves),
            first=table.first,
            returnable=self._rolling.returnable,
        )
        now = self._clock.now()
        if change.new:
            if self._rolling.renews or self._preparing:
                raise Unavailable(RENEWS)
            self._starter.add(list(change.new), change.like)
        self._rolling.take_back(change.returning)
        for members in change.new.values():
            self._carry_out(table.join(members, now))
        self._carry_out(self._rolling.remove(change.leaving, now))
        return Scaled(change.starting, tuple(change.leaving), tuple(change.returning))

    async def remove(self, name: str) -> list[str]:
        """Drain and end a group: see ``weft.control.links.owner.Owner``."""
        self._check_open()
        table = self._table
        names = plan_removal(name, table.members, table.leaving, table.retired, table.serves)
        self._carry_out(self._rolling.remove(names, self._clock.now()))
        return names

    def _check_open(self) -> None:
        """Raise Unavailable while the server shuts down."""
        if self._draining or self._table.over:
            raise Unavailable("the server is shutting down")

    async def revive(self, name: str) -> list[str]:
        """Start retired engines again: see ``weft.control.links.owner.Owner``.

        Raise Unavailable while the server shuts down.
        """
        entries = self._table.entries
        retired = [one for one, entry in entries.items() if entry.state is ProcessState.RETIRED]
        found = to_revive(name, self._table.members, retired)
        self._check_open()
        self._carry_out(self._table.revive(name, self._clock.now()))
        return found

    def _turn(self) -> None:
        """Handle requested restarts, probe answers and time.

        Carry out the resulting actions. While draining, requested restarts are dropped.
        """
        now = self._clock.now()
        # Signal handlers and other threads only set flags. The state machine runs in this thread alone.
        if self._asked:
            self._asked = False
            if not self._draining:
                self._rolling.begin()
        if self._switch_asked:
            self._switch_asked = False
            if not self._draining:
                self._rolling.begin_switch()
        # The API server forgets a leaving engine when its requests have ended, and does not report the end.
        for name in self._table.leaving:
            address = self._addresses.get(name)
            if address is not None and (status := address.process.poll()) is not None:
                error = EngineDead(f"the process ended with status {status}")
                self._carry_out(self._table.lose(name, address.incarnation, error, now))
        for name, incarnation, idle in self._probes.look(self._rolling.watched, self._addresses):
            self._rolling.seen(name, incarnation, idle)
        self._carry_out([*self._table.tick(now), *self._rolling.tick(now)])

    def _carry_out(self, actions: Iterable[Step]) -> None:
        """Carry out each action in order: start, kill or quit an engine, or switch."""
        for action in actions:
            if isinstance(action, Start):
                self._start(action.name, action.incarnation)
            elif isinstance(action, Quit):
                self._probes.quit(action.name)
            elif isinstance(action, Switch):
                self._on_switch()
            elif isinstance(action, Settings):
                self._starter.use(action.names, action.new)
            elif isinstance(action, Forget):
                self._addresses.pop(action.name, None)
                self._starter.forget(action.name)
            else:
                self._starter.kill(action.name, action.incarnation)

    def _start(self, name: str, incarnation: int) -> None:
        """Start the process and store its address.

        A failed start (no memory, no process slots) is logged and counts as a loss.
        """
        try:
            self._addresses[name] = self._starter.start(name, incarnation)
        except OSError as failed:
            # A loss leads to a delayed restart, so a lack of memory does not cause a busy loop.
            error = EngineDead(f"the engine's process cannot be started ({failed.strerror})")
            log.error("%s", error.message)
            self._carry_out(self._table.lose(name, incarnation, error, self._clock.now()))


class Probes:
    """Probes of the engines under replacement. A probe is a connection that shows readiness and idleness."""

    def __init__(self) -> None:
        self._probes: dict[str, tuple[int, EngineProbe]] = {}

    def look(
        self, watched: Mapping[str, int], addresses: Mapping[str, Address]
    ) -> list[tuple[str, int, bool | None]]:
        """Return (name, incarnation, idle) of each watched engine that answers.

        ``watched`` maps names to incarnations. ``idle`` is None if the engine has not reported since the last
        call. Opens probes of watched processes, and closes probes of all other processes.
        """
        for name, (incarnation, probe) in list(self._probes.items()):
            if watched.get(name) != incarnation:
                probe.close()
                del self._probes[name]
        seen = []
        for name, incarnation in watched.items():
            if name not in self._probes:
                address = addresses.get(name)
                # The new process is not started yet; the known address belongs to the old process.
                if address is None or address.incarnation != incarnation:
                    continue
                self._probes[name] = incarnation, EngineProbe(address)
            probe = self._probes[name][1]
            probe.look()
            if probe.answers:
                seen.append((name, incarnation, probe.idle))
        return seen

    def quit(self, name: str) -> None:
        """Order a watched engine to end. No effect on other engines."""
        if name in self._probes:
            self._probes[name][1].quit()

    def close(self) -> None:
        """Close all probes. Idempotent."""
        self.look({}, {})
