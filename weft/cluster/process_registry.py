"""The registry of a server: a file that lists its processes, for fronts that do not own them.

It is in the server's private folder. Only the supervisor writes it, each time as a whole; fronts read it when
it has changed. So a front always sees a consistent state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from weft.cluster.table import Member, Role, to_revive
from weft.common.errors import EngineDead, ErrorInfo, ReportedError, WeftError
from weft.links.link import Address
from weft.parallel.secret import CurveKeys, read_keys

NAME = "registry"


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process, as the registry lists it."""

    role: Role
    name: str
    incarnation: int
    state: Literal["running", "draining", "waiting", "ended", "retired"]
    domain: str = ""
    """Heads of one domain work together or not at all; "" is none."""
    group: str = ""
    """Of a head: the group that it belongs to."""
    endpoint: str | None = None
    """Where a head listens; None while that is not known."""
    pid: int | None = None
    """On this host."""
    secret: str | None = None
    """File with the group's secret, where the head is on another host."""
    error: ErrorInfo | None = None
    """Of a retired one: why."""


class ProcessRegistry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All processes of a server."""

    processes: tuple[ProcessRecord, ...] = ()

    def of(self, role: Role) -> list[ProcessRecord]:
        """The processes of one role, in order."""
        return [record for record in self.processes if record.role == role]


def write(folder: Path, registry: ProcessRegistry) -> None:
    """Replaces the file by ``registry``, atomically."""
    partial = folder / f".{NAME}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(registry))
    partial.replace(folder / NAME)


class RegistryReader:
    """Reads the registry's file when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._seen: tuple[int, int] | None = None
        self._registry = ProcessRegistry()

    def read(self) -> ProcessRegistry:
        """The present registry; the last one read when the file cannot be read, because the server ends."""
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns)
            if seen != self._seen:
                self._registry = msgspec.json.decode(self._path.read_bytes(), type=ProcessRegistry)
                self._seen = seen
        except OSError:
            pass
        return self._registry


class _Elsewhere:
    """A process of another owner: its end shows in the registry."""

    def poll(self) -> int | None:
        return None


class RegistryOwner:
    """The owner of heads as a front sees it that shares them: see ``weft.links.links.Owner``."""

    def __init__(
        self,
        reader: RegistryReader,
        report: Callable[[str, int, WeftError], None],
        revive: Callable[[str], None] = lambda name: None,
    ) -> None:
        """``report`` tells the supervisor that a head is lost, ``revive`` that a group is to come back."""
        self._reader = reader
        self._report, self._revive = report, revive
        self._keys: dict[str, CurveKeys] = {}

    def present(self) -> Mapping[str, Address | WeftError]:
        """For each head the address of its present process, or why none will be started again."""
        return {record.name: self._of(record) for record in self._reader.read().of("head")}

    def replace(self, name: str, incarnation: int, error: WeftError) -> None:
        """Reports to the supervisor that this front has lost the head."""
        self._report(name, incarnation, error)

    def revive(self, name: str) -> list[str]:
        """See ``weft.links.links.Owner``."""
        heads = self._reader.read().of("head")
        members = {one.name: Member(one.domain, one.group) for one in heads}
        found = to_revive(name, members, [one.name for one in heads if one.state == "retired"])
        self._revive(name)
        return found

    def drain(self) -> None:
        """The supervisor knows: it said so."""

    def _of(self, record: ProcessRecord) -> Address | WeftError:
        if record.state in ("retired", "ended"):
            why = record.error
            return EngineDead("the engine has ended") if why is None else ReportedError(why)
        keys = None if record.secret is None else self._keys_of(record.secret)
        endpoint = record.endpoint or (lambda: self._endpoint(record.name, record.incarnation))
        draining = record.state == "draining"
        return Address(endpoint, _Elsewhere(), keys, record.incarnation, draining, record.domain)

    def _keys_of(self, secret: str) -> CurveKeys:
        if secret not in self._keys:
            self._keys[secret] = read_keys(secret)
        return self._keys[secret]

    def _endpoint(self, name: str, incarnation: int) -> str | None:
        for record in self._reader.read().of("head"):
            if (record.name, record.incarnation) == (name, incarnation):
                return record.endpoint
        return None
