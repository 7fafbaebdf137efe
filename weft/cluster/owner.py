"""The owner of the heads of a front in the same process: what it reports as lost is replaced at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from weft.cluster.table import Action, ProcessState, ProcessTable, Start
from weft.common.clock import Clock, SystemClock
from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.links.link import Address

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
        names: Iterable[str],
        starter: Starter,
        restarts: int,
        *,
        together: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """``restarts`` and ``together``: see ``ProcessTable``."""
        self._table = ProcessTable("head", names, restarts, together=together)
        self._starter = starter
        self._clock = clock or SystemClock()
        self._addresses: dict[str, Address] = {}

    def start(self) -> None:
        """Starts every head; does not wait for them."""
        self._carry_out(self._table.start(self._clock.now()))

    def present(self) -> Mapping[str, Address | WeftError]:
        """Of each head its present process, or why none will be started again."""
        present: dict[str, Address | WeftError] = {}
        for name, entry in self._table.entries.items():
            if entry.state is ProcessState.RETIRED and entry.error is not None:
                present[name] = entry.error
            elif name in self._addresses:
                present[name] = self._addresses[name]
        return present

    def replace(self, name: str, incarnation: int, error: WeftError) -> None:
        """A front has lost it."""
        self._carry_out(self._table.lose(name, incarnation, error, self._clock.now()))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action.name, action.incarnation)
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
