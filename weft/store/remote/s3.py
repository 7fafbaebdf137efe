"""Object stores with the interface of S3, and folders, by the package obstore."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError
from obstore.store import from_url

from weft.common import env
from weft.common.errors import ConfigError
from weft.config.sizing.remote_url import FLAG
from weft.store.remote.objects import MOST_LISTED, Listed, ObjectGone, RemoteError

_CONNECT, _REQUEST = "2s", "30s"
"""Time-outs. Callers have shorter deadlines of their own."""
_PART = 1 << 20
"""Bytes of one of the parallel requests of a read."""


class ObstoreObjects:
    """Objects in a bucket or folder."""

    def __init__(self, url: str) -> None:
        """``url``: see ``objects``. Credentials and endpoint come from the usual variables, such as
        AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL. Raises ConfigError."""
        more: dict[str, Any] = {}
        self._folder = unquote(urlsplit(url).path) if url.startswith("file:") else ""
        """The folder; "" for a bucket."""
        if not self._folder:
            # An endpoint without TLS is the operator's decision: the variable names the scheme.
            plain = env.get("AWS_ENDPOINT_URL").startswith("http:")
            options = {"connect_timeout": _CONNECT, "timeout": _REQUEST, "allow_http": plain}
            # The store decides when to try again, and serves misses meanwhile.
            more = {"client_options": options, "retry_config": {"max_retries": 0}}
        try:
            if self._folder:
                # The objects contain prompts: a new folder is for this user alone.
                Path(self._folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._store: Any = from_url(url, **more)
        except (BaseError, ValueError, OSError) as error:
            raise ConfigError(f"{FLAG} {url} cannot be used: {_first_line(error)}", param=FLAG) from error

    async def listing(self, folder: str, after: str) -> Sequence[Listed]:
        made = list[Listed]()
        try:
            async for chunk in obstore.list(self._store, folder or None, offset=after or None):
                made += [Listed(one["path"], one["size"]) for one in chunk]
                # Folders are listed in no order: all names are needed.
                if len(made) >= MOST_LISTED and not self._folder:
                    break
        except (BaseError, OSError) as error:
            raise RemoteError(_first_line(error)) from error
        # A folder may list names up to ``after``.
        return sorted(one for one in made if one.name > after)[:MOST_LISTED]

    async def get(self, name: str, offset: int, nbytes: int) -> memoryview:
        ranges = [(offset + at, min(_PART, nbytes - at)) for at in range(0, nbytes, _PART)]
        try:
            each = [obstore.get_range_async(self._store, name, start=at, length=size) for at, size in ranges]
            parts = await asyncio.gather(*each)
        # An object that may not be read, such as an archived object, says nothing about the other objects.
        except (NotFoundError, FileNotFoundError, PermissionDeniedError, PermissionError) as error:
            raise ObjectGone(name) from error
        except (BaseError, OSError) as error:
            raise RemoteError(_first_line(error)) from error
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    async def put(self, name: str, data: memoryview) -> None:
        try:
            await obstore.put_async(self._store, name, data, use_multipart=False)
        except (BaseError, OSError) as error:
            raise RemoteError(_first_line(error)) from error

    async def delete(self, name: str) -> None:
        try:
            await obstore.delete_async(self._store, name)
        except (NotFoundError, FileNotFoundError):
            return
        except (BaseError, OSError) as error:
            raise RemoteError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    """Return the start of a message. Messages of obstore have many lines, with requests and answers."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
