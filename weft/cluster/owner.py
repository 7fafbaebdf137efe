"""The owner of the heads of a front in the same process: what it reports as lost is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from weft.cluster.rolling import Action as Step
from weft.cluster.rolling import Quit, RollingRestart, Switch
from weft.cluster.table import Member, ProcessState, ProcessTable, Start, to_revive
from weft.common.clock import Clock, SystemClock
from weft.common.errors import EngineDead, Unavailable, WeftError
from weft.common.log import get_logger
from weft.links.link import Address
from weft.links.probe import HeadProbe

log = get_logger(__name__)


class Starter(Protocol):
    """Starts and ends the processes of heads. See ``weft.engine.heads.HeadProcesses``."""

    def start(self, name: str, incarnation: int) -> Address:
        """Does not wait for it."""

    def kill(self, name: str, incarnation: int) -> None:
        """Ends what is left of it, at once. It may have ended."""


class HeadOwner:
    """See ``weft.links.links.Owner``. From the thread whose end may end the heads: see ``HeadProcesses``."""

    def __init__(
        self,
        names: Iterable[str] | Mapping[str, Member],
        starter: Starter,
        restarts: int,
        *,
        serves: Callable[[set[str]], bool] = bool,
        drain_timeout: float = 30.0,
        clock: Clock | None = None,
        on_switch: Callable[[], None] = lambda: None,
    ) -> None:
        """``restarts`` and ``serves``: see ``ProcessTable``. ``drain_timeout``: see ``RollingRestart``.
        ``on_switch`` carries out `Switch`.
        """
        self._table = ProcessTable("head", names, restarts, serves)
        self._rolling = RollingRestart(self._table, drain_timeout)
        self._probes = Probes()
        self._starter = starter
        self._clock = clock or SystemClock()
        self._addresses: dict[str, Address] = {}
        self._asked = self._switch_asked = self._draining = False
        self._on_switch = on_switch

    def start(self) -> None:
        """Starts every head; does not wait for them."""
        self._carry_out(self._table.start(self._clock.now()))

    def restart(self) -> None:
        """Has all heads replaced, one after the other, with their work done. From a signal's handler, too."""
        self._asked = True

    def switch(self) -> None:
        """Has all heads replaced together at an idle moment: see ``RollingRestart``. From any thread."""
        self._switch_asked = True

    def drain(self) -> None:
        """The server drains: from now on heads are replaced only when they die."""
        self._draining = True
        self._rolling.end()

    def present(self) -> Mapping[str, Address | WeftError]:
        """For each head its present process, or why none will be started again. Polled: starts those whose
        time has come.
        """
        self._turn()
        present: dict[str, Address | WeftError] = {}
        for name, entry in self._table.entries.items():
            if entry.state is ProcessState.RETIRED and entry.error is not None:
                present[name] = entry.error
            elif name in self._addresses:
                present[name] = self._addresses[name]._replace(draining=entry.draining)
        return present

    def replace(self, name: str, incarnation: int, error: WeftError) -> None:
        """A front has lost it."""
        self._carry_out(self._table.lose(name, incarnation, error, self._clock.now()))

    def revive(self, name: str) -> list[str]:
        """See ``weft.links.links.Owner``."""
        entries = self._table.entries
        members = {one: entry.member for one, entry in entries.items()}
        retired = [one for one, entry in entries.items() if entry.state is ProcessState.RETIRED]
        found = to_revive(name, members, retired)
        if self._draining or self._table.over:
            raise Unavailable("the server is shutting down")
        self._carry_out(self._table.revive(name, self._clock.now()))
        return found

    def _turn(self) -> None:
        now = self._clock.now()
        if self._asked:
            self._asked = False
            if not self._draining:
                self._rolling.begin()
        if self._switch_asked:
            self._switch_asked = False
            if not self._draining:
                self._rolling.begin_switch()
        for name, incarnation, idle in self._probes.look(self._rolling.watched, self._addresses):
            self._rolling.seen(name, incarnation, idle)
        self._carry_out([*self._table.tick(now), *self._rolling.tick(now)])

    def _carry_out(self, actions: Iterable[Step]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action.name, action.incarnation)
            elif isinstance(action, Quit):
                self._probes.quit(action.name)
            elif isinstance(action, Switch):
                self._on_switch()
            else:
                self._starter.kill(action.name, action.incarnation)

    def _start(self, name: str, incarnation: int) -> None:
        """One that cannot be started, for want of memory or processes, is lost at once."""
        try:
            self._addresses[name] = self._starter.start(name, incarnation)
        except OSError as failed:
            error = EngineDead(f"the engine's process cannot be started ({failed.strerror})")
            log.error("%s", error.message)
            self._carry_out(self._table.lose(name, incarnation, error, self._clock.now()))


class Probes:
    """The probes of the heads that are being replaced."""

    def __init__(self) -> None:
        self._probes: dict[str, tuple[int, HeadProbe]] = {}

    def look(
        self, watched: Mapping[str, int], addresses: Mapping[str, Address]
    ) -> list[tuple[str, int, bool | None]]:
        """(name, incarnation, whether it is idle, if it said so now) of those of ``watched``, name ->
        incarnation, that answer.

        Probes of others are closed.
        """
        for name, (incarnation, probe) in list(self._probes.items()):
            if watched.get(name) != incarnation:
                probe.close()
                del self._probes[name]
        seen = []
        for name, incarnation in watched.items():
            if name not in self._probes:
                address = addresses.get(name)
                if address is None or address.incarnation != incarnation:
                    continue
                self._probes[name] = incarnation, HeadProbe(address)
            probe = self._probes[name][1]
            probe.look()
            if probe.answers:
                seen.append((name, incarnation, probe.idle))
        return seen

    def quit(self, name: str) -> None:
        """Tells a head that is being watched to end."""
        if name in self._probes:
            self._probes[name][1].quit()

    def close(self) -> None:
        """Closes all. Idempotent."""
        self.look({}, {})
