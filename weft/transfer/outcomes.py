"""What the ranks of a group say of a room, combined: failed < pending < done, and the least of them holds."""

from __future__ import annotations

from weft.common.errors import ErrorInfo
from weft.types.rooms import Outcome


class Outcomes:
    """What the ranks of a group have said of one room. What a rank said last holds, but nothing is taken
    back: said twice is said once.
    """

    def __init__(self, ranks: int) -> None:
        self._said = [Outcome.pending] * ranks
        self.error: ErrorInfo | None = None
        """The first one that came with a failure."""

    def take(self, rank: int, outcome: Outcome, error: ErrorInfo | None = None) -> Outcome:
        """A rank reports. Returns what holds for the group."""
        if self._said[rank] is Outcome.pending:
            self._said[rank] = outcome
            if outcome is Outcome.failed and self.error is None:
                self.error = error
        return self.all

    @property
    def all(self) -> Outcome:
        return min(self._said)
