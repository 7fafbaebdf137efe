"""Open sequences waiting for an instance, in order. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

MOST_REFUSALS = 8
"""Times that one instance may refuse or return a sequence before the next token."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0


def wait_after(evictions: int) -> float:
    """Return the seconds to wait after ``evictions`` refusals and returns since the last token.

    The first return costs no wait. Each further return doubles the wait, up to ``LONGEST_WAIT_S``.
    """
    return 0.0 if evictions < 2 else min(FIRST_WAIT_S * 2.0 ** (evictions - 2), LONGEST_WAIT_S)


class Parked:
    """The parked sequences. Some sequences wait until a given time."""

    def __init__(self) -> None:
        self._all: dict[int, None] = {}
        self._waits: dict[int, float] = {}
        """Sequence -> earliest time at which an instance may get the sequence."""

    def add(self, sequence: int, until: float = -math.inf) -> None:
        """Park ``sequence``, at least until the time ``until``."""
        self._all[sequence] = None
        if until > -math.inf:
            self._waits[sequence] = until

    def discard(self, sequence: int) -> None:
        """End the wait of a sequence. Idempotent."""
        self._all.pop(sequence, None)
        self._waits.pop(sequence, None)

    def ready(self, now: float) -> list[int]:
        """Return the sequences ready for an instance now, in order."""
        if self._waits:
            self._waits = {one: until for one, until in self._waits.items() if until > now}
        return [one for one in self._all if one not in self._waits]

    def deadline(self) -> float:
        """Return the time at which ``ready`` grows if nothing happens before; inf for never."""
        return min(self._waits.values(), default=math.inf)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._all
