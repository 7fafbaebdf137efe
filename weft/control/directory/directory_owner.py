"""The owner of engines that run alone and publish themselves in a directory: the API server finds engines,
and starts or ends none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from weft.common.clock import Clock, SystemClock
from weft.common.counted_log import CountedLog
from weft.common.errors import Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.directory.leases import Leases
from weft.control.directory.record import DirectoryReader, EngineRecord
from weft.control.links.link import Address, Process, ProcessElsewhere
from weft.control.links.owner import EngineInfo, Scaled
from weft.control.processes.scaling import plan_removal
from weft.control.processes.table import Member
from weft.parallel.secret import CurveKeys
from weft.types.handshake import IDENTITY_SINCE, EngineIdentity

log = get_logger(__name__)

READ_S = 0.5
"""Seconds between two reads of the directory."""
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0
"""Seconds before the first and the last of several connections to an engine that was lost."""
_ATTEMPT = 1 << 64
"""Added to an incarnation for each further connection."""
_ALONE = "the engines of this server run alone (`weft engine`), and this API server starts none: "
_SCALE = _ALONE + (
    "start `weft engine FILE --group NAME` for each further group (on Kubernetes: scale the StatefulSet), "
    "and end a group with `weft drain NAME`"
)
_RESTART = _ALONE + (
    "give `weft drain NAME` for one group after the other. Kubernetes, or a loop around `weft engine`, "
    "starts a group again after its end"
)
_REVIVE = _ALONE + "so none is given up. Start the group with `weft engine FILE --group NAME`"


class _Loss(NamedTuple):
    incarnation: int
    times: int
    """Connections lost in a row of the incarnation."""
    due: float
    """Time of the next connection."""


class DirectoryOwner:
    """Implementation of ``weft.control.links.owner.Owner`` over a directory.

    An expired record removes the engine as a member; the requests of the engine go on as long as the link to
    the engine lives. A renewed record makes the engine a member again.
    """

    shared = True
    elastic = True

    def __init__(
        self,
        directory: DirectoryReader,
        model: str,
        keys: CurveKeys | None,
        serves: Callable[[set[str]], bool] = bool,
        clock: Clock | None = None,
    ) -> None:
        """``model``: engines of another model are refused. ``keys``: None if all engines are on this host.
        ``serves``: see ``ProcessTable``."""
        self._directory, self._model, self._keys, self._serves = directory, model, keys, serves
        self._clock = clock or SystemClock()
        self._leases = Leases()
        self._records: dict[str, EngineRecord] = {}
        self._fingerprint = ""
        """Fingerprint of the first engine found; all others must have the same."""
        self._read_at = -READ_S
        self._good_at = self._clock.now()
        """Time of the last read that succeeded."""
        self._refused: set[tuple[str, int]] = set()
        self._losses: dict[str, _Loss] = {}
        """Engine -> lost connections to its present process."""
        self._trouble = CountedLog(log)

    def present(self, kept: int = 0) -> Mapping[str, Address | WeftError | None]:
        """See ``Owner``. A directory that cannot be read keeps its last content."""
        now = self._clock.now()
        if now >= self._read_at + READ_S:
            self._read_at = now
            self._read(now)
        return {name: self._address(record) for name, record in self._records.items()}

    def replace(self, instance: str, incarnation: int, error: WeftError) -> None:
        """Plan another connection: the engine may live, beyond a network that was broken. An engine that has
        died is started again by others, under a new incarnation."""
        past = self._losses.get(instance)
        times = past.times + 1 if past is not None and past.incarnation == incarnation % _ATTEMPT else 1
        wait = min(FIRST_WAIT_S * 2 ** (times - 1), LONGEST_WAIT_S)
        self._losses[instance] = _Loss(incarnation % _ATTEMPT, times, self._clock.now() + wait)

    def drain(self) -> None:
        """Do nothing: the engines outlive the API server."""

    def describe(self) -> list[EngineInfo]:
        """See ``Owner``."""
        return [
            EngineInfo(one.name, one.group, one.base, one.role, "leaving" if one.draining else "running")
            for one in self._records.values()
        ]

    async def remove(self, name: str) -> list[str]:
        """See ``Owner``. The engines drain and end by themselves. Raise Unavailable if the directory cannot
        be reached."""
        names = plan_removal(name, self._members(), self._leaving(), self._retired(), self._serves)
        await self._ask_to_leave(names)
        return names

    async def remove_all(self) -> None:
        """Drain and end all engines: an operator unloads one of several models. Raise Unavailable if the
        directory cannot be reached."""
        await self._ask_to_leave([name for name, record in self._records.items() if not record.draining])

    async def scale(self, base: str, groups: int) -> Scaled:
        """Raise Unavailable: the API server starts no engine."""
        raise Unavailable(_SCALE)

    async def restart(self, name: str = "", topology: str = "") -> list[str]:
        """Raise Unavailable: the API server starts no engine."""
        raise Unavailable(_RESTART)

    async def revive(self, name: str) -> list[str]:
        """Raise Unavailable: the API server starts no engine."""
        raise Unavailable(_REVIVE)

    def _members(self) -> dict[str, Member]:
        """Return all engines of the server by name."""
        return {n: Member(r.expert_group, r.group, r.role, r.base, r.tower) for n, r in self._records.items()}

    def _leaving(self) -> frozenset[str]:
        """Return the engines that leave."""
        return frozenset(name for name, record in self._records.items() if record.draining)

    def _retired(self) -> frozenset[str]:
        """Return the engines that nobody starts again."""
        return frozenset()

    async def _ask_to_leave(self, names: Iterable[str]) -> None:
        """Ask engines to drain and end. Raise Unavailable if an engine cannot be asked."""
        # The directory is read again between two orders, and an engine may have gone by then.
        records = [self._records[name] for name in names]
        try:
            for record in records:
                await asyncio.to_thread(self._directory.ask_drain, record)
        except OSError as error:
            raise Unavailable(f"the engine cannot be asked to drain ({error}); try again") from error

    def _read(self, now: float) -> None:
        """Read the directory. Time in which the directory was not read does not count for the leases."""
        try:
            found = self._directory.read()
        except OSError as error:
            self._trouble.warn("the directory of engines cannot be read (%s)", error)
            return
        # The directory was away, or this process stood still.
        if now - self._good_at > 2 * READ_S:
            self._leases.stall(now - self._good_at - READ_S)
        self._good_at = now
        fresh = self._leases.present(found, now)
        if all(record.fingerprint != self._fingerprint for record in fresh.values()):
            self._fingerprint = ""  # the last engine with these weights has gone: others may come
        self._records = {name: record for name, record in fresh.items() if self._fits(record)}
        self._losses = {name: loss for name, loss in self._losses.items() if name in found}
        self._refused = {one for one in self._refused if one[0] in found}

    def _fits(self, record: EngineRecord) -> bool:
        """Return True if the engine serves this server's model; another engine is logged once."""
        why = ""
        if record.model != self._model:
            why = f"it serves {record.model}, and this API server serves {self._model}"
        elif record.fingerprint and self._fingerprint not in ("", record.fingerprint):
            why = "its weights or types differ from those of the first engine"
        elif record.endpoint.startswith("tcp:") and self._keys is None:
            why = "it is on another host, and this API server has no --group-secret"
        if why and (record.name, record.incarnation) not in self._refused:
            self._refused.add((record.name, record.incarnation))
            log.error("engine %s is not used: %s", record.name, why)
        if not why:
            self._fingerprint = self._fingerprint or record.fingerprint
        return not why

    def _attempt(self, record: EngineRecord) -> int:
        """Return a number of the connection to the engine of ``record``: links tell connections apart by the
        number. A connection that was lost gets the next number after a wait."""
        loss = self._losses.get(record.name)
        if loss is None or loss.incarnation != record.incarnation:
            return record.incarnation
        times = loss.times if self._clock.now() >= loss.due else loss.times - 1
        return record.incarnation + times * _ATTEMPT

    def _process(self, record: EngineRecord) -> Process:
        """Return the process of an engine. Only the links find the end of the process."""
        return ProcessElsewhere()

    def _address(self, record: EngineRecord) -> Address:
        keys = self._keys if record.endpoint.startswith("tcp:") else None
        return Address(
            record.endpoint,
            self._process(record),
            keys,
            self._attempt(record),
            record.draining,
            record.expert_group,
            leaving=record.draining,
            identity=_identity(record),
        )


def _identity(record: EngineRecord) -> EngineIdentity | None:
    """Return the identity of the engine of ``record``; None for an engine that does not know the field."""
    if record.messages < IDENTITY_SINCE:
        return None
    return EngineIdentity(name=record.name, model=record.model, start=record.incarnation)
