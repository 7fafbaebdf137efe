"""How many connections are open, and which of them is given up when there are too many.

A connection waits for its client until a whole request has come. Above the bound, the one that has waited
longest makes room for the new one: who is served is never closed, and a client that opens connections and
sends nothing, or little, only loses its own.
"""

from __future__ import annotations

from typing import Protocol

MOST = 8192
"""Connections on which a server that may open enough files settles, for their memory: one that waits in the
middle of an upload takes about 30 KiB."""
MOST_AHEAD = 64 << 20
"""Bytes that clients may have sent behind requests that are still being answered, over all connections."""


class WaitingConnection(Protocol):
    """What is needed of a connection."""

    def give_way(self) -> None:
        """Closes it: its client has kept it waiting the longest."""


class Connections:
    """The open connections of one server. Used from its event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._open: set[WaitingConnection] = set()
        self._waiting: dict[WaitingConnection, None] = {}
        """Those that wait for their client, longest first."""
        self._ahead: dict[WaitingConnection, int] = {}
        self._all_ahead = 0

    def opened(self, connection: WaitingConnection) -> bool:
        """A new one is there. False when it must be closed at once, as no other one can."""
        if len(self._open) >= self._most:
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            self.closed(longest)
            longest.give_way()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def waits(self, connection: WaitingConnection) -> None:
        """Notes that ``connection`` waits for its client from now on."""
        self.works(connection)
        if connection in self._open:
            self._waiting[connection] = None

    def works(self, connection: WaitingConnection) -> None:
        """Notes that all of a request has come."""
        self._waiting.pop(connection, None)

    def holds(self, connection: WaitingConnection, ahead: int) -> bool:
        """Notes that ``ahead`` bytes wait behind its request. False when that is too much."""
        self._all_ahead += ahead - self._ahead.pop(connection, 0)
        if ahead:
            self._ahead[connection] = ahead
        return self._all_ahead <= MOST_AHEAD or not ahead

    def closed(self, connection: WaitingConnection) -> None:
        """Forgets a connection that is gone. Idempotent."""
        self._open.discard(connection)
        self.holds(connection, 0)
        self._waiting.pop(connection, None)


def most_connections(files: int, requests: int) -> int:
    """The bound where ``files`` may be open and ``requests`` are served at once.

    A quarter of the files is left to sockets of the engine, and to what is opened before others have closed.
    """
    return max(min(files * 3 // 4, max(MOST, 2 * requests)), 1)
