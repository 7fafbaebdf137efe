"""Number of open connections, and the choice of the connection to close above the limit.

A connection waits for its client until a whole request has arrived. Above the limit, the connection with
the longest wait is closed for a new connection. A connection with a request in progress is never closed. So
a client that opens connections and sends nothing, or little, only loses its own.
"""

from __future__ import annotations

from typing import Protocol

MOST = 8192
"""Minimum limit of connections, if enough files may be open. Bounds memory: a connection in the middle of
an upload takes about 30 KiB."""
MOST_AHEAD = 64 << 20
"""Maximum bytes received behind unanswered requests, over all connections."""


class WaitingConnection(Protocol):
    """The part of a connection used here."""

    def give_way(self) -> None:
        """Close the connection, which has the longest wait for its client."""


class Connections:
    """Open connections of one server. Used from the server's event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._open: set[WaitingConnection] = set()
        self._waiting: dict[WaitingConnection, None] = {}
        """Connections waiting for their client, longest wait first."""
        self._ahead: dict[WaitingConnection, int] = {}
        self._all_ahead = 0

    def opened(self, connection: WaitingConnection) -> bool:
        """Register a new connection as waiting for its client. Above the limit, close the connection with
        the longest wait. Return False, without registration, if no other connection can be closed: then the
        caller must close the new connection."""
        if len(self._open) >= self._most:
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            # Remove the connection first: `give_way` may call `closed` again.
            self.closed(longest)
            longest.give_way()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def waits(self, connection: WaitingConnection) -> None:
        """Mark ``connection`` as waiting for its client, with the shortest wait. No effect for a closed
        connection."""
        self.works(connection)
        if connection in self._open:
            self._waiting[connection] = None

    def works(self, connection: WaitingConnection) -> None:
        """Mark ``connection`` as working: a whole request has arrived."""
        self._waiting.pop(connection, None)

    def holds(self, connection: WaitingConnection, ahead: int) -> bool:
        """Record ``ahead`` bytes behind the connection's request, in place of the last number. Return False
        if such bytes of all connections exceed the limit; the caller then closes the connection."""
        self._all_ahead += ahead - self._ahead.pop(connection, 0)
        if ahead:
            self._ahead[connection] = ahead
        return self._all_ahead <= MOST_AHEAD or not ahead

    def closed(self, connection: WaitingConnection) -> None:
        """Remove a closed connection. Idempotent."""
        self._open.discard(connection)
        self.holds(connection, 0)
        self._waiting.pop(connection, None)


def most_connections(files: int, requests: int) -> int:
    """Return the limit for ``files`` open files and ``requests`` concurrent requests.

    A quarter of the files stays free for the engine's sockets, and for files opened before others have
    closed.
    """
    return max(min(files * 3 // 4, max(MOST, 2 * requests)), 1)
