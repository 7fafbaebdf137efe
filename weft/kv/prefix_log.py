"""The cached prefixes of a pool, as changes since the last report."""

from __future__ import annotations

from collections.abc import Iterable

from weft.kv.block_events import BlockEvents


class PrefixLog:
    """Follows the index of one ``BlockPool``. A key added and removed since the last ``take`` is not
    reported."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        """``keys``: the present index, which is not reported as a change."""
        self.keys: dict[bytes, None] = dict.fromkeys(keys)
        """All keys in the index, oldest first."""
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.events: BlockEvents | None = None
        """Record of every change in order, after ``record``."""

    def record(self, positions: int, base_block: int) -> BlockEvents:
        """Return the record of all changes from now on, see ``BlockEvents``. The first call creates the
        record."""
        if self.events is None:
            self.events = BlockEvents(positions, base_block)
        return self.events

    def add(self, key: bytes) -> None:
        """Record a new ``key`` in the index."""
        self.keys[key] = None
        if self.events is not None:
            self.events.added(key)
        if key in self._removed:
            del self._removed[key]
        else:
            self._added[key] = None

    def remove(self, key: bytes) -> None:
        """Record the removal of ``key`` from the index."""
        if self.events is not None:
            self.events.removed(key)
        self._remove(key)

    def clear(self) -> None:
        """Record the removal of all keys."""
        if self.events is not None:
            self.events.cleared()
        for key in list(self.keys):
            self._remove(key)

    def take(self) -> tuple[bytes, bytes]:
        """Return (added keys, removed keys) since the last call, each concatenated."""
        changes = b"".join(self._added), b"".join(self._removed)
        self._added.clear()
        self._removed.clear()
        return changes

    def _remove(self, key: bytes) -> None:
        del self.keys[key]
        if key in self._added:
            del self._added[key]
        else:
            self._removed[key] = None
