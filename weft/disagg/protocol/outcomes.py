"""Combined outcome of a transfer over the ranks of a group: the minimum, with failed < pending < done."""

from __future__ import annotations

from weft.common.errors import ErrorInfo
from weft.types.transfer import Outcome


class Outcomes:
    """Reports of the ranks of a group about one transfer. The first final report (done or failed) of a rank
    counts; later reports of the same rank are ignored."""

    def __init__(self, ranks: int) -> None:
        self._said = [Outcome.pending] * ranks
        self.error: ErrorInfo | None = None
        """Error of the first failure report; None without a failure or without an error."""

    def take(self, rank: int, outcome: Outcome, error: ErrorInfo | None = None) -> Outcome:
        """Record a rank's report and return the combined outcome of the group. Only the first final report of
        a rank counts; the first error is stored."""
        if self._said[rank] is Outcome.pending:
            self._said[rank] = outcome
            if outcome is Outcome.failed and self.error is None:
                self.error = error
        return self.all

    @property
    def all(self) -> Outcome:
        return min(self._said)
