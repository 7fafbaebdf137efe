"""Which prefixes a pool has cached, as changes since they were last told."""

from __future__ import annotations

from collections.abc import Iterable


class PrefixLog:
    """Follows the index of one ``BlockPool``. What came and went since the last ``take`` is in neither
    set.
    """

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        """``keys``: in the index already; they are no change."""
        self.keys: dict[bytes, None] = dict.fromkeys(keys)
        """All that are in the index now, oldest first."""
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, key: bytes) -> None:
        """``key`` is in the index from now on."""
        self.keys[key] = None
        if key in self._removed:
            del self._removed[key]
        else:
            self._added[key] = None

    def remove(self, key: bytes) -> None:
        """``key`` is in the index no longer."""
        del self.keys[key]
        if key in self._added:
            del self._added[key]
        else:
            self._removed[key] = None

    def clear(self) -> None:
        """The index is empty."""
        for key in list(self.keys):
            self.remove(key)

    def take(self) -> tuple[bytes, bytes]:
        """(keys added, keys removed) since the last call, one behind the other."""
        changes = b"".join(self._added), b"".join(self._removed)
        self._added.clear()
        self._removed.clear()
        return changes
