"""Step reports of the ranks: which ranks have ended a step, and checksums of samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Steps:
    """Unsettled steps of one epoch. A step is settled once all ranks have reported equal checksums."""

    def __init__(self, rank: int, others: Sequence[int], patience: float) -> None:
        """Create an empty record. ``patience``: maximum seconds of ``others`` behind ``rank``."""
        self._rank, self._others, self._patience = rank, others, patience
        self.own = -1
        """The last ended step of ``rank``; -1 for none."""
        self._checksums: dict[int, dict[int, int]] = {}
        """Step -> rank -> checksum, for unsettled steps."""
        self._due: dict[int, float] = {}
        """Unsettled steps ended by ``rank``, in order -> deadline for the other ranks, in seconds."""

    def clear(self) -> None:
        """Drop all unsettled steps, because another epoch begins. ``own`` stays."""
        self._checksums.clear()
        self._due.clear()

    def take(self, rank: int, step: int, checksum: int, now: float) -> tuple[int, int] | None:
        """Record the end of ``step`` on ``rank``, and settle complete steps in order.

        Return (rank, step) of the first checksum that differs from the checksum of the engine's rank; that
        step stays unsettled. Return None without a difference.
        """
        self._checksums.setdefault(step, {})[rank] = checksum
        if rank == self._rank:
            self.own, self._due[step] = step, now + self._patience
        for number in list(self._due):
            checksums = self._checksums[number]
            if len(checksums) <= len(self._others):
                break
            for other in self._others:
                if checksums[other] != checksums[self._rank]:
                    return other, number
            del self._checksums[number], self._due[number]
        return None

    def extend(self, now: float) -> None:
        """Restart all deadlines at ``now``, because no frames were read for a long time."""
        self._due = dict.fromkeys(self._due, now + self._patience)

    def settled(self, step: int) -> bool:
        """Return True if no step up to ``step`` waits for another rank.

        A step unfinished on the own rank does not wait for other ranks.
        """
        return all(number > step for number in self._due)

    def late(self) -> tuple[float, int, int] | None:
        """Return (deadline, rank, step) of the oldest missing report; None if no report is missing."""
        for number, due in self._due.items():
            missing = next((r for r in self._others if r not in self._checksums[number]), None)
            if missing is not None:
                return due, missing, number
        return None
