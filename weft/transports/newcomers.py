"""Places for connections whose hand-shake is not over. Pure.

Whoever connects gets a place; where there is none, the connection that has waited longest gives its own. A
hand-shake takes milliseconds, so those that wait long are silent. No address takes the places of others, and
addresses of peers that have proven themselves lose theirs last.
"""

from __future__ import annotations

MOST_UNPROVEN = 64
"""Connections of one address whose hand-shake is not over."""
MOST = 512
"""Connections of all addresses."""


class Newcomers:
    """Connections by address, the oldest first. An address is "" where all connections are of this host."""

    def __init__(self, each: int, most: int = MOST) -> None:
        self._each, self._most = each, most
        self._waiting: dict[str, dict[str, None]] = {}
        self._known: set[str] = set()
        """Addresses of peers that know the secret."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, address: str, connection: str) -> str | None:
        """``connection`` waits. Returns another one that makes room for it; None where there is room."""
        victim = None
        if len(self._waiting.get(address, ())) >= self._each:
            victim = self._oldest(address)
        elif len(self) >= self._most:
            strangers = [one for one in self._waiting if one not in self._known and one != address]
            victim = self._oldest(max(strangers or self._waiting, key=lambda one: len(self._waiting[one])))
        self._waiting.setdefault(address, {})[connection] = None
        return victim

    def proved(self, address: str, connection: str) -> None:
        """The hand-shake of ``connection`` is over."""
        self._known.add(address)
        self.left(address, connection)

    def left(self, address: str, connection: str) -> None:
        """``connection`` waits no more. Idempotent."""
        waiting = self._waiting.get(address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(address, None)

    def _oldest(self, address: str) -> str:
        connection = next(iter(self._waiting[address]))
        self.left(address, connection)
        return connection
