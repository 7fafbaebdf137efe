"""Record of ended transfers, so that late messages about an ended transfer are recognised as late."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from weft.types.transfer import TransferKey

T = TypeVar("T")


class Tombstones(Generic[T]):
    """Ended transfers with a value each (how the transfer ended), remembered for ``seconds``.

    ``seconds`` must exceed the longest deadline of a transfer: no message of a transfer is under way after
    its deadline.
    """

    def __init__(self, seconds: float, most: int = 16 << 20) -> None:
        """``most``: maximum bytes of entries added on behalf of one stranger (``add_of``)."""
        self._seconds, self._most = seconds, most
        self._ended: OrderedDict[TransferKey, tuple[float, T]] = OrderedDict()
        self._of: dict[Hashable, OrderedDict[TransferKey, int]] = {}
        """Stranger -> bytes of each entry, oldest first."""
        self._by: dict[TransferKey, Hashable] = {}
        self._bytes: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._ended

    def add(self, key: TransferKey, how: T, now: float) -> None:
        """Record the end of ``key``. The first recorded end wins."""
        self._ended.setdefault(key, (now + self._seconds, how))

    def add_of(self, stranger: Hashable, key: TransferKey, how: T, size: int, now: float) -> None:
        """Record the end of a transfer unknown here, as reported by ``stranger``. The stranger's oldest
        entries are dropped above ``most`` bytes."""
        if key in self._ended:
            return
        self.add(key, how, now)
        theirs = self._of.setdefault(stranger, OrderedDict())
        theirs[key], self._by[key] = size, stranger
        self._bytes[stranger] = self._bytes.get(stranger, 0) + size
        while self._bytes.get(stranger, 0) > self._most:
            self._forget(next(iter(theirs)))

    def _forget(self, key: TransferKey) -> None:
        """Remove an entry and the bytes counted for its stranger. Raises KeyError for an unknown key."""
        del self._ended[key]
        if (stranger := self._by.pop(key, None)) is not None:
            self._bytes[stranger] -= self._of[stranger].pop(key)
            if not self._of[stranger]:
                del self._of[stranger], self._bytes[stranger]

    def get(self, key: TransferKey) -> T | None:
        entry = self._ended.get(key)
        return None if entry is None else entry[1]

    def expire(self, now: float) -> None:
        """Drop all expired entries."""
        while self._ended and next(iter(self._ended.values()))[0] <= now:
            self._forget(next(iter(self._ended)))

    def next_due(self) -> float | None:
        """Return the time of the next expiry; None if nothing is remembered."""
        return next(iter(self._ended.values()))[0] if self._ended else None


class Parking(Generic[T]):
    """Messages or writes of unknown transfers. Each entry stays for ``seconds``; all entries
    together have at most ``most`` bytes."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._parked: OrderedDict[TransferKey, tuple[float, list[tuple[int, T]]]] = OrderedDict()
        self.used = 0
        """Bytes in use."""

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, key: TransferKey, what: T, size: int, now: float) -> bool:
        """Store ``what``, of ``size`` bytes. Return False, and store nothing, if there is no space."""
        if self.used + size > self._most:
            return False
        self._parked.setdefault(key, (now + self._seconds, []))[1].append((size, what))
        self.used += size
        return True

    def flush(self, key: TransferKey) -> list[T]:
        """Remove and return all entries of ``key``, in order of arrival."""
        _, parked = self._parked.pop(key, (0.0, []))
        self.used -= sum(size for size, _ in parked)
        return [what for _, what in parked]

    def expire(self, now: float) -> list[tuple[TransferKey, T]]:
        """Remove and return all expired entries."""
        late = list[tuple[TransferKey, T]]()
        # The time of a key starts at the first entry, so the dict is ordered by expiry.
        while self._parked and next(iter(self._parked.values()))[0] <= now:
            key = next(iter(self._parked))
            late += [(key, what) for what in self.flush(key)]
        return late

    def next_due(self) -> float | None:
        return next(iter(self._parked.values()))[0] if self._parked else None
