"""The directory and the owner of a server whose groups Ray places."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import ray

from weft.common.errors import EngineDead, Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.directory.cached import CachedDirectory
from weft.control.directory.directory_owner import DirectoryOwner
from weft.control.directory.record import EngineRecord
from weft.control.links.link import Address, Process
from weft.control.links.owner import EngineInfo, Scaled
from weft.control.processes.scaling import plan_restart, plan_scale, to_revive
from weft.control.processes.table import Member
from weft.on_ray.actors import CALL_S, NAMESPACE, fleet_name
from weft.on_ray.plans import GroupPlan, Snapshot
from weft.parallel.secret import CurveKeys, derive

log = get_logger(__name__)

ORDER_S = 15.0
"""Maximum seconds for an order to the fleet actor."""


class RayDirectory:
    """Implementation of ``DirectoryReader`` over the fleet actor. ``read`` waits for the actor's answer.
    Engines publish through their group actors."""

    def __init__(self, server: str) -> None:
        """Find the fleet actor, and read once. Raise Unavailable if there is none."""
        self._server = server
        try:
            self.read()
        except OSError as error:
            raise Unavailable(str(error)) from error

    @property
    def snapshot(self) -> Snapshot:
        """The state of the fleet at the last read. Safe from any thread."""
        return self._snapshot

    def read(self) -> Mapping[str, EngineRecord]:
        """See ``DirectoryReader``. Waits up to ``CALL_S`` seconds."""
        try:
            data = ray.get(self._actor().snapshot.remote(), timeout=CALL_S)
            self._snapshot = msgspec.msgpack.decode(data, type=Snapshot)
        except Exception as error:  # of Ray, or of another release's answer
            raise OSError(f"Ray has no server {self._server!r} ({type(error).__name__})") from error
        return {record.name: record for record in self._snapshot.records}

    def ask_drain(self, record: EngineRecord) -> None:
        """See ``DirectoryReader``. The whole group drains and ends."""
        self.order("remove", record.group)

    def order(self, order: str, *arguments: Any) -> None:
        """Send an order to the fleet actor, and read the new state. Raise OSError if the actor does not
        answer within ``ORDER_S``; then the order may hold or not."""
        try:
            ray.get(getattr(self._actor(), order).remote(*arguments), timeout=ORDER_S)
        except Exception as error:
            raise OSError(f"Ray: the fleet actor does not answer ({type(error).__name__})") from error
        self.read()

    def _actor(self) -> Any:
        return ray.get_actor(fleet_name(self._server), namespace=NAMESPACE)


class RayProcess(NamedTuple):
    """An engine process. The group actor of the engine reports the end, long before a link gives up."""

    directory: RayDirectory
    engine: str
    incarnation: int

    def poll(self) -> int | None:
        """Return 1 after the end, else None. The exit status is not known."""
        return 1 if self.directory.snapshot.ended.get(self.engine) == self.incarnation else None


class RayOwner(DirectoryOwner):
    """Owner of groups that Ray runs: wanted groups without a record count as members, and can be scaled,
    restarted and revived."""

    def __init__(
        self,
        directory: RayDirectory,
        model: str,
        keys: CurveKeys,
        serves: Callable[[set[str]], bool],
    ) -> None:
        super().__init__(CachedDirectory(directory), model, keys, serves)
        self._ray = directory
        self._secret = self._note = ""
        """As last seen in the state of the fleet."""

    def present(self, kept: int = 0) -> Mapping[str, Address | WeftError | None]:
        """See ``Owner``. A wanted engine without a record is None, or an error once Ray has given up."""
        found = dict(super().present(kept))
        snapshot = self._ray.snapshot
        for plan in snapshot.plans:
            gone = EngineDead("Ray has given the group up") if plan.group in snapshot.retired else None
            for name in plan.engines:
                found.setdefault(name, gone)
        return found

    def describe(self) -> list[EngineInfo]:
        """See ``Owner``."""
        known = {one.name: one for one in super().describe()}
        snapshot = self._ray.snapshot
        for plan in snapshot.plans:
            for name in plan.engines:
                state = "retired" if plan.group in snapshot.retired else "waiting"
                known.setdefault(name, EngineInfo(name, plan.group, plan.base, plan.role, state))  # type: ignore[arg-type]
        return list(known.values())

    async def scale(self, base: str, groups: int) -> Scaled:
        """See ``Owner``. Ray finds a place for new groups; without a place they wait. With 0 groups, requests
        wait. Groups that drain do not come back: their commands have the signal to end."""
        members = await self._fresh()
        snapshot = self._ray.snapshot
        change = plan_scale(
            base,
            groups,
            members,
            self._leaving(),
            self._retired(),
            self._serves,
            first=_members_of(snapshot.shapes),
            empty=True,
        )
        plans: list[GroupPlan] = []
        if change.new:
            # The plan of the present topology: groups that run may have an earlier plan.
            like = next(plan for plan in snapshot.shapes if plan.base == base)
            plans = [like.named(group) for group in change.new]
            await self._order("want", msgspec.msgpack.encode(plans))
        await self._ask_to_leave(change.leaving)
        return Scaled(tuple(name for plan in plans for name in plan.engines), tuple(change.leaving))

    async def restart(self, name: str = "", topology: str = "") -> list[str]:
        """See ``Owner``. Raise Unavailable for a topology: `weft up` brings new settings to Ray."""
        if topology:
            raise Unavailable(
                "Ray runs the groups: run `weft up FILE --on ray` with the new file, then `weft restart` "
                "without --file"
            )
        members = await self._fresh()
        names = plan_restart(name, members, self._leaving() | self._retired())
        await self._order("restart", list(dict.fromkeys(members[one].group for one in names)))
        return names

    async def revive(self, name: str) -> list[str]:
        """See ``Owner``."""
        members = await self._fresh()
        names = to_revive(name, members, self._retired())
        for group in dict.fromkeys(members[one].group for one in names):
            await self._order("revive", group)
        return names

    def _read(self, now: float) -> None:
        """Also use the keys of the present secret: the fleet actor after a ``--stop`` has another secret."""
        super()._read(now)
        snapshot = self._ray.snapshot  # as new as the records, or newer
        if snapshot.secret and snapshot.secret != self._secret:
            self._secret, self._keys = snapshot.secret, derive(snapshot.secret.encode())
        if snapshot.note != self._note:
            self._note = snapshot.note
            if snapshot.note:
                log.error("%s", snapshot.note)

    def _process(self, record: EngineRecord) -> Process:
        return RayProcess(self._ray, record.name, record.incarnation)

    def _members(self) -> dict[str, Member]:
        """Return all engines, wanted or present."""
        wanted = _members_of(self._ray.snapshot.plans)
        return wanted | {name: one for name, one in super()._members().items() if name not in wanted}

    def _leaving(self) -> frozenset[str]:
        """Return engines that drain, or whose group is not wanted any more."""
        wanted = {name for plan in self._ray.snapshot.plans for name in plan.engines}
        return super()._leaving() | (self._records.keys() - wanted)

    def _retired(self) -> frozenset[str]:
        snapshot = self._ray.snapshot
        return frozenset(n for plan in snapshot.plans if plan.group in snapshot.retired for n in plan.engines)

    async def _ask_to_leave(self, names: Iterable[str]) -> None:
        """Order the groups of engines to drain and end, also groups without a record."""
        members = self._members()
        for group in dict.fromkeys(members[name].group for name in names):
            await self._order("remove", group)

    async def _fresh(self) -> dict[str, Member]:
        """Read the state of the fleet, so that a plan knows earlier orders. Return all engines."""
        await self._to_fleet(self._ray.read)
        return self._members()

    async def _order(self, order: str, *arguments: Any) -> None:
        """Return after the fleet actor has stored the order."""
        await self._to_fleet(self._ray.order, order, *arguments)

    async def _to_fleet(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Run a call that waits for the fleet actor. Raise Unavailable if the actor does not answer."""
        try:
            await asyncio.to_thread(call, *arguments)
        except OSError as error:
            raise Unavailable(f"{error}; try again") from error


def _members_of(plans: Iterable[GroupPlan]) -> dict[str, Member]:
    """Return the engines of ``plans``."""
    return {
        name: Member(plan.expert_group, plan.group, plan.role, plan.base)
        for plan in plans
        for name in plan.engines
    }
