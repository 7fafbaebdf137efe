"""The models of a server at the supervisor, as seen by one API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.common.errors import WeftError
from weft.control.model_fronts import ModelsRecord, Use
from weft.control.processes import channel
from weft.control.processes.process_registry import RegistryOwner, RegistryReader


class SupervisorHub:
    """Implements ``weft.front.requests.models.shared_models.ModelHub`` by the registry and the channel."""

    def __init__(self, link: channel.SupervisorLink, reader: RegistryReader, member: str) -> None:
        """``member``: name of this API server in the record."""
        self._link, self._reader = link, reader
        self.member = member

    def record(self) -> ModelsRecord | None:
        """Return the present record; None before the first."""
        return self._reader.read().models

    def owner(self, model: str, load: int, keeps: Callable[[int], None]) -> RegistryOwner:
        """Return the owner of the engines of a load. ``keeps``: see ``RegistryOwner``."""
        commands = channel.LoadLink(self._link, channel.Load(model, load))
        return RegistryOwner(self._reader, commands.report, commands, keeps, model=model, load=load)

    @property
    def behind(self) -> bool:
        """True while messages wait, because the supervisor does not read."""
        return self._link.behind

    def join(self) -> None:
        """Ask to be a member."""
        self._link.say(channel.FrontJoins())

    def used(self, seen: int, uses: dict[str, Use]) -> None:
        """Report the last seen version, and the use of the models whose use has changed. Many models take
        several messages; only the last one has ``seen``, because the counts belong to that version."""
        names = list(uses)
        while len(names) > channel.MOST_USES:
            part, names = names[: channel.MOST_USES], names[channel.MOST_USES :]
            self._link.say(channel.ModelsUsed(0, {name: uses[name] for name in part}))
        self._link.say(channel.ModelsUsed(seen, {name: uses[name] for name in names}))

    def ready(self, model: str, load: int, cost: int = 0, error: WeftError | None = None) -> None:
        """Report a load that works, or does not: see ``LoadSeen``."""
        info = None if error is None else error.info()
        self._link.say(channel.ModelReady(channel.Load(model, load), cost, info))

    async def ask(self, model: str, what: Any, seconds: float = 0.0) -> None:
        """Send the command of an operator. Return when the record shows the command. Raise WeftError."""
        await self._link.command(lambda number: channel.ModelAsked(model, what, number, seconds))
