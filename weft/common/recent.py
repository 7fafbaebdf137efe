"""An LRU cache: a mapping with a maximum size that drops the least recently used entry first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Collection[K], Generic[K, V]):
    """At most ``most`` entries. ``get`` and ``put`` count as a use, ``in`` does not."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[K, V] = OrderedDict()
        """Entries, least recently used first."""

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value, or None without an entry. Counts as a use."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Set the value, which must not be None. Drops the least recently used entry beyond ``most``
        entries.
        """
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def discard(self, key: K) -> None:
        """Remove the entry, if there is one."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        self._entries.clear()
