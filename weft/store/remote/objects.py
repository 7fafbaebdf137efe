"""The contract of an object store, and the object stores by URL.

s3://bucket/prefix, gs://.., az://.., file:///folder    package obstore (``pip install "weft[s3]"``)
mooncake://master:50051/prefix                          package mooncake-transfer-engine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from weft.config.sizing.remote_url import check_url

MOST_LISTED = 5_000
"""Maximum objects that one ``listing`` returns, in order of their names: five requests of S3."""


class RemoteError(Exception):
    """A request to the object store that failed."""


class ObjectGone(RemoteError):
    """There is no such object."""


class Listed(NamedTuple):
    """An object."""

    name: str
    nbytes: int


class Objects(Protocol):
    """Objects under one prefix. Names are ``folder/file``. All coroutines run on one event loop, may be
    cancelled at any time, and raise RemoteError."""

    async def listing(self, folder: str, after: str) -> Sequence[Listed]:
        """Return objects of ``folder`` with names above ``after``, in order of names, at most
        ``MOST_LISTED``; fewer only at the end. ``folder`` "": of all folders."""

    async def get(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Return bytes of an object, fewer at the end. Raises ObjectGone."""

    async def put(self, name: str, data: memoryview) -> None:
        """Create an object. Readers see the whole object or none."""

    async def delete(self, name: str) -> None:
        """Remove an object, if there is one."""


def open_objects(url: str) -> Objects:
    """Return the object store of a URL. Makes no request, except for Mooncake. Raise ConfigError."""
    check_url(url)
    if url.startswith("mooncake:"):
        from weft.store.remote.mooncake import MooncakeObjects

        return MooncakeObjects(url)
    from weft.store.remote.s3 import ObstoreObjects

    return ObstoreObjects(url)
