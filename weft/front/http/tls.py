"""TLS context of the API server, which follows changes of the certificate files.

Each handshake compares the files with the last read. After a change, this handshake and all later handshakes
use the new files. Open connections keep their keys. A change to files that do not fit together is logged, and
the server keeps the last good files until the next change.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import Any, TypeAlias

import uvloop

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.secret_file import warn_of_readable_key
from weft.config.sections.front_section import FrontSection
from weft.config.sections.tls import server_context, tls_files

log = get_logger(__name__)

HANDSHAKE_S = 10.0
"""Maximum seconds of a TLS handshake. A connection counts as open only after its handshake."""
SHUTDOWN_S = 2.0
"""Maximum seconds that the end of a connection waits for the client's end of TLS."""

_Stamps: TypeAlias = tuple[tuple[int, ...] | None, ...]


class ServerTls:
    """The TLS context of one API server process. Used from the event loop."""

    def __init__(self, front: FrontSection) -> None:
        """Read the files of ``front``, which has a certificate. Raise ConfigError that names a flag."""
        self._front = front
        self._seen = _stamps(front)  # before the read: a change during the read is seen by the next handshake
        context = _context(front)
        self.context = context
        """Context for the listening socket. Each handshake changes to the context of the newest files."""
        self._newest = context
        context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Give ``connection`` the context of the newest files, at the start of the handshake. OpenSSL also
        calls the function for clients without a host name."""
        stamps = _stamps(self._front)
        if stamps != self._seen:
            self._seen = stamps
            self._reload()
        connection.context = self._newest

    def _reload(self) -> None:
        """Read the files again. After an error, keep the last context and log a warning."""
        try:
            self._newest = _context(self._front)
        except ConfigError as error:
            log.warning("the changed TLS files are not used, and the last good files stay: %s", error.message)
            return
        log.info("the TLS files have changed: new connections use the new files")


def open_tls(front: FrontSection) -> ServerTls | None:
    """Return the TLS context of a server; None for plain HTTP. Raise ConfigError that names a flag."""
    return None if front.ssl_certfile is None and server_context(front) is None else ServerTls(front)


def _context(front: FrontSection) -> ssl.SSLContext:
    """Return the context of the present files. Log a warning if other users can read the private key."""
    context = server_context(front)
    assert context is not None
    warn_of_readable_key(front.ssl_keyfile or front.ssl_certfile or "")
    return context


def _stamps(front: FrontSection) -> _Stamps:
    """Return values that differ after a change of a TLS file: inode, size and time of each file."""
    found: list[tuple[int, ...] | None] = []
    for path in tls_files(front):
        try:
            state = os.stat(path)
            found.append((state.st_ino, state.st_size, state.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


class ServerLoop(uvloop.Loop):
    """uvloop's event loop. TLS servers limit the time of a handshake and of the end of a connection."""

    async def create_server(  # type: ignore[override]
        self, factory: Callable[[], asyncio.BaseProtocol], *args: Any, **options: Any
    ) -> asyncio.AbstractServer:
        """Create a server as uvloop does."""
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", HANDSHAKE_S)
            options.setdefault("ssl_shutdown_timeout", SHUTDOWN_S)
        return await super().create_server(factory, *args, **options)
