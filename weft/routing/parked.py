"""Open sequences that wait for an instance, in order. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

MOST_REFUSALS = 8
"""Times that one instance may give a sequence back before a token of it comes."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0


def wait_after(evictions: int) -> float:
    """Seconds that a sequence waits that was given back ``evictions`` times since its last token: the first
    time none, then twice as long each time.
    """
    return 0.0 if evictions < 2 else min(FIRST_WAIT_S * 2.0 ** (evictions - 2), LONGEST_WAIT_S)


class Parked:
    """The sequences, and those of them that wait for a time, too."""

    def __init__(self) -> None:
        self._all: dict[int, None] = {}
        self._waits: dict[int, float] = {}
        """Sequence -> until when no instance gets it."""

    def add(self, sequence: int, until: float = -math.inf) -> None:
        """``sequence`` waits, until that time at least."""
        self._all[sequence] = None
        if until > -math.inf:
            self._waits[sequence] = until

    def discard(self, sequence: int) -> None:
        """Ends the wait of a sequence. Idempotent."""
        self._all.pop(sequence, None)
        self._waits.pop(sequence, None)

    def ready(self, now: float) -> list[int]:
        """Sequences that may go to an instance now, in order."""
        if self._waits:
            self._waits = {one: until for one, until in self._waits.items() if until > now}
        return [one for one in self._all if one not in self._waits]

    def deadline(self) -> float:
        """When ``ready`` has more, if none comes before; inf for never."""
        return min(self._waits.values(), default=math.inf)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._all
