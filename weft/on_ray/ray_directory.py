"""The directory and the owner of a server whose groups Ray places."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import ray

from weft.common.errors import EngineDead, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.directory.cached import CachedDirectory
from weft.control.directory.directory_owner import DirectoryOwner
from weft.control.directory.record import EngineRecord
from weft.control.links.link import Address, Process
from weft.control.links.owner import EngineInfo, Scaled
from weft.on_ray.actors import CALL_S, NAMESPACE, fleet_name
from weft.on_ray.orders import scaled
from weft.on_ray.plans import Order, Ordered, Snapshot
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
        self.order(Order(what="drain", name=record.group))

    def order(self, order: Order) -> Ordered:
        """Return the answer of the fleet actor to an order, and read the new state. Raise OSError if the
        actor does not answer within ``ORDER_S``; then the order may hold or not."""
        try:
            data = ray.get(self._actor().order.remote(msgspec.msgpack.encode(order)), timeout=ORDER_S)
            answer = msgspec.msgpack.decode(data, type=Ordered)
        except Exception as error:  # of Ray, or of another release's fleet actor
            raise OSError(f"Ray: the fleet actor does not answer ({type(error).__name__})") from error
        self.read()
        return answer

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
        fallback: str,
    ) -> None:
        """``fallback``: ``--prefill-fallback`` of this API server."""
        super().__init__(CachedDirectory(directory), model, keys)
        self._ray = directory
        self._fallback = fallback
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
        """See ``Owner``. The fleet actor plans this order and all others."""
        return scaled(
            await self._order(Order(what="scale", name=base, groups=groups, fallback=self._fallback))
        )

    async def remove(self, name: str) -> list[str]:
        """See ``Owner``."""
        return [*(await self._order(Order(what="drain", name=name, fallback=self._fallback))).leaving]

    async def remove_all(self) -> None:
        """See ``DirectoryOwner``. The groups can be scaled up again."""
        for base in dict.fromkeys(plan.base for plan in self._ray.snapshot.plans):
            await self.scale(base, 0)

    async def restart(self, name: str = "", topology: str = "") -> list[str]:
        """See ``Owner``. Raise Unavailable for a topology: `weft up` brings new settings to Ray."""
        if topology:
            raise Unavailable(
                "Ray runs the groups: run `weft up FILE --on ray` with the new file, then `weft restart` "
                "without --file"
            )
        return [*(await self._order(Order(what="restart", name=name))).starting]

    async def revive(self, name: str) -> list[str]:
        """See ``Owner``."""
        return [*(await self._order(Order(what="revive", name=name))).starting]

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

    async def _order(self, order: Order) -> Ordered:
        """Return the answer after the fleet actor has stored the order. Raise the error of the order, or
        Unavailable if the actor does not answer."""
        try:
            answer = await asyncio.to_thread(self._ray.order, order)
        except OSError as error:
            raise Unavailable(f"{error}; try again") from error
        if answer.error is not None:
            raise ReportedError(answer.error)
        return answer
