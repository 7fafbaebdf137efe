"""The leases of an expert-parallel group's engines: files on one host, or entries of the rendezvous store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from weft.group.types import Lease
from weft.parallel.rendezvous import RendezvousClient
from weft.types.rendezvous import lease_key


class Leases(Protocol):
    """Published leases of the engines of an expert-parallel group. Used from one thread at a time."""

    def read(self) -> Sequence[Lease | None]:
        """Return the latest known leases of all replicas, in order; None for an unknown lease. Does not
        wait."""

    def write(self, lease: Lease) -> None:
        """Publish this engine's lease."""


class FolderLeases:
    """Leases as files in a folder shared by the engines of one host; only this user can enter the folder."""

    def __init__(self, folder: str, replica: int, replicas: int) -> None:
        self._paths = [Path(folder) / f"lease{number}" for number in range(replicas)]
        self._mine = self._paths[replica]

    def read(self) -> list[Lease | None]:
        """Return the lease of each replica, None for a replica without a file.

        Raises the errors of msgspec for a broken file.
        """
        leases: list[Lease | None] = []
        for path in self._paths:
            try:
                leases.append(msgspec.msgpack.decode(path.read_bytes(), type=Lease))
            except FileNotFoundError:
                leases.append(None)
        return leases

    def write(self, lease: Lease) -> None:
        new = self._mine.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(lease))
        os.replace(new, self._mine)


class RendezvousLeases:
    """Leases as entries of the rendezvous store. A read returns the table of the last poll."""

    def __init__(self, client: RendezvousClient, replica: int, replicas: int) -> None:
        self._client = client
        self._keys = [lease_key(number) for number in range(replicas)]
        self._mine = self._keys[replica]

    def read(self) -> list[Lease | None]:
        entries = self._client.entries
        found = [entries.get(key) for key in self._keys]
        return [None if data is None else msgspec.msgpack.decode(data, type=Lease) for data in found]

    def write(self, lease: Lease) -> None:
        self._client.post(self._mine, msgspec.msgpack.encode(lease))
