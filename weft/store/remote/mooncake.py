"""Objects in a Mooncake store, by the package mooncake-transfer-engine.

Mooncake cannot list keys. So each folder has a log: numbered keys, each with name and size of one object. A
writer takes the first free number, and looks whether its entry is the one that counts. Mooncake may evict
objects: the object is then gone, and its entry in the log names nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from weft.common.errors import ConfigError
from weft.config.sizing.remote_url import FLAG
from weft.store.remote.objects import MOST_LISTED, Listed, ObjectGone, RemoteError

_T = TypeVar("_T")
_WINDOW = 256
"""Numbers of a log that one request looks at."""
_TRIES = 64
_LOCAL_BYTES = 128 << 20
"""Memory of this process for requests."""
_FOLDERS = "folders"
_PIECE = 1 << 20
"""Bytes of one value: Mooncake reads whole values."""


class MooncakeObjects:
    """Objects of one master: ``mooncake://HOST:PORT/prefix?protocol=tcp&device=&metadata=P2PHANDSHAKE``."""

    def __init__(self, url: str) -> None:
        """Connect to the master. Raises ConfigError."""
        parts, facts = urlsplit(url), parse_qs(urlsplit(url).query)
        given = {name: values[-1] for name, values in facts.items()}
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"{FLAG}: the package of Mooncake does not load: {error}", param=FLAG
            ) from error
        self._prefix = parts.path.strip("/") or "weft"
        self._store: Any = MooncakeDistributedStore()
        self._ends: dict[str, int] = {}
        """Folder -> first number of its log that was free at the last look."""
        self._noted = set[str]()
        """Folders that are in the log of folders."""
        self._sizes: dict[str, int] = {}
        """Object -> bytes, of all entries of logs so far."""
        failed = self._store.setup(
            given.get("host", socket.gethostname()),
            given.get("metadata", "P2PHANDSHAKE"),
            0,  # bytes that this process lends to the store
            _LOCAL_BYTES,
            given.get("protocol", "tcp"),
            given.get("device", ""),
            parts.netloc,
        )
        if failed:
            raise ConfigError(f"{FLAG}: the master {parts.netloc} does not answer ({failed})", param=FLAG)

    async def listing(self, folder: str, after: str) -> Sequence[Listed]:
        return await _threaded(lambda: self._list(folder, after))

    async def get(self, name: str, offset: int, nbytes: int) -> memoryview:
        return await _threaded(lambda: self._get(name, offset, nbytes))

    async def put(self, name: str, data: memoryview) -> None:
        await _threaded(lambda: self._put(name, data))

    async def delete(self, name: str) -> None:
        await _threaded(lambda: self._delete(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _pieces(self, name: str, first: int, end: int) -> list[str]:
        """Return the keys of the pieces with bytes ``first`` .. end - 1 of an object."""
        return [self._key(f"{name}/{piece}") for piece in range(first // _PIECE, -(-end // _PIECE))]

    def _log(self, folder: str) -> list[str]:
        """Return the entries of a log, in order."""
        made, number, end = list[str](), 0, 0
        while True:
            keys = [self._key(f"log/{folder}/{number + at}") for at in range(_WINDOW)]
            found = self._store.batch_is_exist(keys)
            there = [at for at, one in enumerate(found) if one == 1]
            if not there:
                self._ends[folder] = end
                return made
            end = number + there[-1] + 1
            made += [bytes(self._store.get(keys[at])).decode() for at in there]
            number += _WINDOW

    def _list(self, folder: str, after: str) -> list[Listed]:
        folders = [folder] if folder else sorted(set(self._log(_FOLDERS)))
        for one in folders:
            for entry in self._log(one):
                name, _, size = entry.rpartition(" ")
                self._sizes[name] = int(size)
        names = sorted(name for name in self._sizes if name > after and name.partition("/")[0] in folders)
        there = self._store.batch_is_exist([self._key(f"{name}/0") for name in names]) if names else []
        return [Listed(n, self._sizes[n]) for n, one in zip(names, there, strict=True) if one == 1][
            :MOST_LISTED
        ]

    def _get(self, name: str, offset: int, nbytes: int) -> memoryview:
        pieces = self._store.get_batch(self._pieces(name, offset, offset + nbytes))
        if not all(pieces):
            raise ObjectGone(name)
        begin = offset % _PIECE
        return memoryview(b"".join(pieces))[begin : begin + nbytes]

    def _put(self, name: str, data: memoryview) -> None:
        keys = self._pieces(name, 0, len(data))
        # The first piece goes last: an object counts once the first piece is there.
        for at, key in reversed(list(enumerate(keys))):
            failed = self._store.put(key, data[at * _PIECE : (at + 1) * _PIECE])
            if failed:
                raise RemoteError(f"Mooncake did not take an object ({failed})")
        folder = name.partition("/")[0]
        if folder not in self._noted:
            if folder not in self._log(_FOLDERS):
                self._note(_FOLDERS, folder)
            self._noted.add(folder)
            self._log(folder)
        self._note(folder, f"{name} {len(data)}")

    def _delete(self, name: str) -> None:
        if name not in self._sizes:
            self._list(name.partition("/")[0], "")
        # The entry of the log stays, and names nothing.
        for key in reversed(self._pieces(name, 0, self._sizes.pop(name, _PIECE))):
            self._store.remove(key, True)  # also while a reader has a lease

    def _note(self, folder: str, entry: str) -> None:
        """Append an entry to a log. Raises RemoteError."""
        number = self._ends.get(folder, 0)
        for at in range(number, number + _TRIES):
            key = self._key(f"log/{folder}/{at}")
            # A put of a key that is there changes nothing: the first writer of a number counts.
            if self._store.put(key, entry.encode()) == 0 and bytes(self._store.get(key)) == entry.encode():
                self._ends[folder] = at + 1
                return
        raise RemoteError("the log of a folder takes no entry")


async def _threaded(work: Callable[[], _T]) -> _T:
    """Run blocking calls of Mooncake in a thread. Raises RemoteError."""
    try:
        return await asyncio.to_thread(work)
    except RemoteError:
        raise
    except Exception as error:
        raise RemoteError(f"Mooncake: {error}") from error
