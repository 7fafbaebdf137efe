"""Places for connections in the handshake. Pure.

Every new connection gets a place. If no place is free, the oldest waiting connection loses its place. A
handshake takes milliseconds, so old connections are silent ones. An address over its own limit loses its
own oldest place. Over the total limit, the unknown address with most places loses one; addresses of proven
peers lose places last.
"""

from __future__ import annotations

MOST_UNPROVEN = 64
"""Maximum connections of one address in the handshake."""
MOST = 512
"""Maximum connections of all addresses in the handshake."""


class Newcomers:
    """Connections in the handshake by address, oldest first. The address is "" if all peers are on this
    host."""

    def __init__(self, each: int, most: int = MOST) -> None:
        self._each, self._most = each, most
        self._waiting: dict[str, dict[str, None]] = {}
        self._known: set[str] = set()
        """Addresses of peers with a finished handshake."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, address: str, connection: str) -> str | None:
        """Add ``connection`` of a peer at ``address``. Return the connection that must be closed to make
        room; None if there is room. The returned connection is already forgotten here."""
        victim = None
        if len(self._waiting.get(address, ())) >= self._each:
            victim = self._oldest(address)
        elif len(self) >= self._most:
            # Proven addresses, and the address of the new connection, lose places only if no other address
            # is left.
            strangers = [one for one in self._waiting if one not in self._known and one != address]
            victim = self._oldest(max(strangers or self._waiting, key=lambda one: len(self._waiting[one])))
        self._waiting.setdefault(address, {})[connection] = None
        return victim

    def proved(self, address: str, connection: str) -> None:
        """Record the end of the handshake of ``connection``."""
        self._known.add(address)
        self.left(address, connection)

    def left(self, address: str, connection: str) -> None:
        """Remove ``connection``. Idempotent."""
        waiting = self._waiting.get(address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(address, None)

    def _oldest(self, address: str) -> str:
        connection = next(iter(self._waiting[address]))
        self.left(address, connection)
        return connection
