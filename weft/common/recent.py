"""A mapping that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Collection[K], Generic[K, V]):
    """At most ``most`` entries. To get one, or to put it, is to use it; to look for one is not."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[K, V] = OrderedDict()
        """The one that was used longest ago first."""

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """None where there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Forgets another one where there is no room. ``value``: not None."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def discard(self, key: K) -> None:
        """Forgets it. Nothing happens where there is none."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        self._entries.clear()
