"""The open sequences of all clients, and the sequences at no instance. Pure data, owned by the fleet."""

from __future__ import annotations

from collections.abc import Iterable

from weft.common.counted_log import CountedLog
from weft.common.errors import WeftError
from weft.common.log import get_logger
from weft.control.fleet.events import Opened
from weft.control.fleet.lateness import Lateness
from weft.control.fleet.ledger import LedgerEntry
from weft.control.fleet.parked import Parked

log = get_logger(__name__)


class OpenSequences:
    """All open sequences. A sequence is parked, paused, or at instances (``LedgerEntry.places``)."""

    def __init__(self) -> None:
        self.entries: dict[int, LedgerEntry] = {}
        self.requests: dict[int, dict[int, None]] = {}
        """Request -> open sequences (an ordered set). The sequences share a prompt, and prompt blocks at one
        instance."""
        self._refusals = CountedLog(log)
        self.parked = Parked()
        """Sequences waiting for an instance, in order."""
        self.paused: dict[int, None] = {}
        """Sequences not read by the client."""
        self.bereft: set[int] = set()
        """Parked or paused sequences after the loss of an instance."""

    def open(self, event: Opened) -> None:
        """Add the sequences of a new request as parked."""
        for submit in event.submits:
            hashes = event.hashes.get(submit.request)
            self.entries[submit.sequence] = LedgerEntry(submit, hashes, event.pinned)
            self.requests.setdefault(submit.request, {})[submit.sequence] = None
            self.parked.add(submit.sequence)

    def forget(self, sequence: int) -> None:
        """Remove an ended sequence from all fields. Raises KeyError for an unknown sequence."""
        entry = self.entries.pop(sequence)
        siblings = self.requests[entry.submit.request]
        del siblings[sequence]
        if not siblings:
            del self.requests[entry.submit.request]
        self.parked.discard(sequence)
        self.paused.pop(sequence, None)
        self.bereft.discard(sequence)

    def unpaused(self, sequences: Iterable[int]) -> list[int]:
        """Return the open and unpaused members of ``sequences``."""
        return [one for one in sequences if one in self.entries and one not in self.paused]

    @property
    def kept(self) -> int:
        """Number of begun sequences at no instance. Each continues later from its tokens."""
        return sum(self.entries[one].attempt >= 0 for one in [*self.paused, *self.parked])

    def pause(self, sequence: int) -> None:
        """Mark a sequence as paused. The caller has removed the sequence from all instances."""
        self.parked.discard(sequence)
        self.paused[sequence] = None

    def resume(self, sequences: Iterable[int]) -> None:
        """Park again all paused members of ``sequences``."""
        for sequence in sequences:
            if sequence in self.paused:
                del self.paused[sequence]
                self.parked.add(sequence)

    def placed(self, sequence: int) -> bool:
        """End the wait of a sequence: no longer parked or bereft.

        Return True if the sequence continues after the loss of an instance.
        """
        self.parked.discard(sequence)
        bereft = sequence in self.bereft
        self.bereft.discard(sequence)
        return bereft

    def near(self, request: int) -> set[str]:
        """Return the names of the instances with sequences of ``request``."""
        return {name for each in self.requests[request] for name in self.entries[each].places}

    def late(self, lateness: Lateness) -> list[tuple[int, WeftError]]:
        """Return the parked sequences after too long a wait, each with the error.

        Removes nothing; the error is logged.
        """
        found: list[tuple[int, WeftError]] = []
        for sequence in self.parked:
            entry = self.entries[sequence]
            error = lateness.why(begun=entry.attempt >= 0, images=bool(entry.submit.media))
            if error is not None:
                self._refusals.say("a request fails: %s", error.message)
                found.append((sequence, error))
        return found
