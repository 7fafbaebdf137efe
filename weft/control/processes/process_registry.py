"""The registry of a server: a file that lists all processes, for API servers that share engines.

The file is in the server's private folder. Only the supervisor writes the file, and replaces the whole
content each time. API servers read the file after each change. So an API server always sees a consistent
state.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from weft.common.errors import EngineDead, ErrorInfo, ReportedError, WeftError
from weft.control.links.link import Address, ProcessElsewhere
from weft.control.links.owner import EngineInfo, Scaled
from weft.control.model_fronts import ModelsRecord
from weft.control.processes.table import Condition, ProcessEntry, Role
from weft.parallel.secret import CurveKeys, read_keys

NAME = "registry"


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Registry entry of one process."""

    role: Role
    name: str
    incarnation: int
    state: Condition
    expert_group: str = ""
    """Name of the engine's expert-parallel group; "" if none."""
    group: str = ""
    """Engine only: name of the group."""
    base: str = ""
    """Engine only: name of the group without its number."""
    group_role: str = "unified"
    """Engine only: role of the group."""
    endpoint: str | None = None
    """Address of an engine's socket; None if unknown so far."""
    pid: int | None = None
    """Process id on this host; None for processes of other hosts."""
    secret: str | None = None
    """Path of the file with the group's secret, for an engine that needs encryption keys."""
    error: ErrorInfo | None = None
    """Retired only: reason of the retirement."""
    model: str = ""
    """Engine only: model of the engine, in a server of several models."""
    load: int = 0
    """Engine only: number of the load of ``model``."""


def record_of_engine(
    name: str, entry: ProcessEntry, address: Address | None, secret: str | None = None, **of_load: Any
) -> ProcessRecord:
    """Return the entry of an engine. ``address``: None before the first process. ``secret``: path of the file
    with the group's secret. ``of_load``: ``model`` and ``load``."""
    endpoint = None if address is None else address.endpoint
    process = None if address is None else address.process
    return ProcessRecord(
        role="head",
        name=name,
        incarnation=entry.incarnation,
        state=entry.condition,
        expert_group=entry.member.expert_group,
        group=entry.member.group,
        base=entry.member.base,
        group_role=entry.member.role,
        endpoint=endpoint() if callable(endpoint) else endpoint,
        pid=process.pid if isinstance(process, subprocess.Popen) else None,
        secret=secret if address is not None and address.keys is not None else None,
        error=None if entry.error is None else entry.error.info(),
        **of_load,
    )


class ProcessRegistry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All processes of a server."""

    processes: tuple[ProcessRecord, ...] = ()
    models: ModelsRecord | None = None
    """State of the models of a server of several models."""
    carrier: str = ""
    """See ``weft.control.processes.supervisor.Supervisor.carrier``."""

    def of(self, role: Role, model: str = "", load: int = 0) -> list[ProcessRecord]:
        """Return the processes of one role, in start order. ``model``, ``load``: engines of one load."""
        wanted = (role, model, load)
        return [record for record in self.processes if (record.role, record.model, record.load) == wanted]


def write(folder: Path, registry: ProcessRegistry) -> None:
    """Replace the registry file in ``folder`` atomically. Raise OSError if the file cannot be written."""
    partial = folder / f".{NAME}"
    # Mode 0600: the registry names the file with the group's secret.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(registry))
    # A rename is atomic, so a reader sees the old or the new file, never a part.
    partial.replace(folder / NAME)


class RegistryReader:
    """Reader of the registry file, with a cache of the last content."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._seen: tuple[int, int] | None = None
        self._registry = ProcessRegistry()

    def read(self) -> ProcessRegistry:
        """Return the present registry.

        Return the last content if the file is gone, because the server ends. Raise DecodeError of msgspec for
        an invalid file.
        """
        try:
            status = self._path.stat()
            # Each write makes a new file. The inode detects changes within the clock's resolution.
            seen = (status.st_ino, status.st_mtime_ns)
            if seen != self._seen:
                self._registry = msgspec.json.decode(self._path.read_bytes(), type=ProcessRegistry)
                self._seen = seen
        except OSError:
            pass
        return self._registry


class Commands(Protocol):
    """Commands of operators to the supervisor. Each returns the changes, or raises the supervisor's refusal.

    The arguments are those of ``weft.control.links.owner.Owner``.
    """

    async def scale(self, base: str, groups: int) -> Scaled: ...

    async def remove(self, name: str) -> Scaled: ...

    async def restart(self, name: str, topology: str) -> Scaled: ...

    async def revive(self, name: str) -> Scaled: ...


class RegistryOwner:
    """Engine owner for an API server that shares the engines. Implement
    ``weft.control.links.owner.Owner``.
    """

    shared = True
    elastic = False

    def __init__(
        self,
        reader: RegistryReader,
        report: Callable[[str, int, WeftError], None],
        commands: Commands,
        keeps: Callable[[int], None] = lambda kept: None,
        *,
        model: str = "",
        load: int = 0,
    ) -> None:
        """``report`` notifies the supervisor of a lost engine. ``keeps`` reports the number of begun
        sequences at no engine. ``model``, ``load``: of the engines, in a server of several models.
        """
        self._of_load = model, load
        self._reader = reader
        self._keeps, self._report, self._commands = keeps, report, commands
        self._keys: dict[str, CurveKeys] = {}

    def present(self, kept: int = 0) -> Mapping[str, Address | WeftError | None]:
        """Return, by name, the address of each present engine, or the error that ended the engine for
        good.
        """
        self._keeps(kept)
        return {record.name: self._of(record) for record in self._engines()}

    def replace(self, name: str, incarnation: int, error: WeftError) -> None:
        """Report a lost engine to the supervisor."""
        self._report(name, incarnation, error)

    def describe(self) -> list[EngineInfo]:
        """Return all members: see ``weft.control.links.owner.Owner``."""
        engines = self._engines()
        return [
            EngineInfo(
                one.name,
                one.group,
                one.base,
                one.group_role,
                one.state,
                one.incarnation,
                "" if one.error is None else one.error.message,
            )
            for one in engines
        ]

    async def revive(self, name: str) -> list[str]:
        """Start retired engines: see ``weft.control.links.owner.Owner``."""
        return list((await self._commands.revive(name)).starting)

    async def restart(self, name: str = "", topology: str = "") -> list[str]:
        """Begin a rolling restart: see ``weft.control.links.owner.Owner``."""
        return list((await self._commands.restart(name, topology)).starting)

    async def scale(self, base: str, groups: int) -> Scaled:
        """Change the number of groups: see ``weft.control.links.owner.Owner``."""
        return await self._commands.scale(base, groups)

    async def remove(self, name: str) -> list[str]:
        """Drain and end a group: see ``weft.control.links.owner.Owner``."""
        return list((await self._commands.remove(name)).leaving)

    def drain(self) -> None:
        """Do nothing: the order to drain came from the supervisor."""

    def _engines(self) -> list[ProcessRecord]:
        return self._reader.read().of("head", *self._of_load)

    def _of(self, record: ProcessRecord) -> Address | WeftError:
        """Return the address of the process in ``record``, or the error if the process has ended for good."""
        if record.state in ("retired", "ended"):
            why = record.error
            return EngineDead("the engine has ended") if why is None else ReportedError(why)
        keys = None if record.secret is None else self._keys_of(record.secret)
        # The address of an engine on another host may be unknown at first. The link then polls the function.
        endpoint = record.endpoint or (lambda: self._endpoint(record.name, record.incarnation))
        leaving = record.state == "leaving"
        draining = leaving or record.state == "draining"
        return Address(
            endpoint, ProcessElsewhere(), keys, record.incarnation, draining, record.expert_group, leaving
        )

    def _keys_of(self, secret: str) -> CurveKeys:
        """Return the encryption keys of a secret file. Each file is read once."""
        if secret not in self._keys:
            self._keys[secret] = read_keys(secret)
        return self._keys[secret]

    def _endpoint(self, name: str, incarnation: int) -> str | None:
        """Return the address of an engine process from the present registry, or None if unknown."""
        for record in self._engines():
            if (record.name, record.incarnation) == (name, incarnation):
                return record.endpoint
        return None
