"""What is known of rooms that have ended: long enough for the last message about them to be told apart."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from weft.types.rooms import RoomKey

T = TypeVar("T")


class Tombstones(Generic[T]):
    """Rooms that ended, each with how, for ``seconds``: the longest deadline of a room, and some more.

    Nothing that belongs to a room is under way longer than its deadline.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended: OrderedDict[RoomKey, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._ended

    def add(self, key: RoomKey, how: T, now: float) -> None:
        """``key`` has ended. How it ended first holds."""
        self._ended.setdefault(key, (now + self._seconds, how))

    def get(self, key: RoomKey) -> T | None:
        entry = self._ended.get(key)
        return None if entry is None else entry[1]

    def expire(self, now: float) -> None:
        """Forgets those whose time is over."""
        while self._ended and next(iter(self._ended.values()))[0] <= now:
            self._ended.popitem(last=False)

    def next_due(self) -> float | None:
        """When the next one is forgotten."""
        return next(iter(self._ended.values()))[0] if self._ended else None


class Parking(Generic[T]):
    """What came before its room is known here: kept for ``seconds``, up to ``most`` bytes in all."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._parked: OrderedDict[RoomKey, tuple[float, list[tuple[int, T]]]] = OrderedDict()
        self.used = 0
        """Bytes."""

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, key: RoomKey, what: T, size: int, now: float) -> bool:
        """Keeps ``what``, of ``size`` bytes, if there is room."""
        if self.used + size > self._most:
            return False
        self._parked.setdefault(key, (now + self._seconds, []))[1].append((size, what))
        self.used += size
        return True

    def flush(self, key: RoomKey) -> list[T]:
        """What came for ``key``, in order; none of it is kept."""
        _, parked = self._parked.pop(key, (0.0, []))
        self.used -= sum(size for size, _ in parked)
        return [what for _, what in parked]

    def expire(self, now: float) -> list[tuple[RoomKey, T]]:
        """Gives up what nobody has come for, and returns it."""
        late = list[tuple[RoomKey, T]]()
        while self._parked and next(iter(self._parked.values()))[0] <= now:
            key = next(iter(self._parked))
            late += [(key, what) for what in self.flush(key)]
        return late

    def next_due(self) -> float | None:
        return next(iter(self._parked.values()))[0] if self._parked else None
