"""Reports of steps: which ranks have ended a step, and what they sampled. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Steps:
    """Steps of one epoch that some rank has reported, and not all."""

    def __init__(self, rank: int, others: Sequence[int], patience: float) -> None:
        """``patience``: seconds that ``others`` may be behind ``rank``."""
        self._rank, self._others, self._patience = rank, others, patience
        self.own = -1
        """The last step that ended on ``rank``."""
        self._checksums: dict[int, dict[int, int]] = {}
        """Step -> rank -> checksum, of steps that are not settled."""
        self._due: dict[int, float] = {}
        """Steps that ended on ``rank`` and are not settled, in order, and by when they must be."""

    def clear(self) -> None:
        """Another epoch begins."""
        self._checksums.clear()
        self._due.clear()

    def take(self, rank: int, step: int, checksum: int, now: float) -> tuple[int, int] | None:
        """A step has ended on a rank. A rank that sampled something else than this one, and in which step."""
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
        """Frames were not read for long: other ranks get their time from ``now`` on."""
        self._due = dict.fromkeys(self._due, now + self._patience)

    def settled(self, step: int) -> bool:
        """Whether all ranks have ended ``step``, if this one has, and all before it, with equal checksums."""
        return all(number > step for number in self._due)

    def late(self) -> tuple[float, int, int] | None:
        """Until when is waited for which rank and step."""
        for number, due in self._due.items():
            missing = next((r for r in self._others if r not in self._checksums[number]), None)
            if missing is not None:
                return due, missing, number
        return None
