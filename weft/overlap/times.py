"""The times of a step: compute and communication, of each micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.parallel.launcher import Flight


class Stretch(NamedTuple):
    """An uninterrupted run of a micro-batch, between two communication points. Seconds of
    ``time.monotonic``."""

    micro_batch: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The times of one step up to its logits on one rank, in seconds."""

    micro_batches: int
    """2 if the step was computed in micro-batches, else 1."""
    seconds: float
    stretches: Sequence[Stretch] = ()
    """Stretches in order of time; a whole step has one."""
    flights: Sequence[Flight] = ()
    """Collectives in order of launch."""
    device: float | None = None
    """Seconds of a replayed step on the device, up to its logits or its draw; None if not measured."""
    drafting: Sequence[Flight] = field(default=())
    """Collectives of sampling and drafting after the step; nothing hides such collectives."""

    @property
    def waited(self) -> float:
        """Seconds in which compute waited for communication."""
        return sum(flight.waited for flight in self.flights)

    @property
    def communication(self) -> float:
        """Seconds in which at least one collective was in flight."""
        return covered((flight.began, flight.ended) for flight in self.flights)

    @property
    def hidden(self) -> float:
        """Seconds of ``communication`` under compute."""
        return max(self.communication - self.waited, 0.0)

    @property
    def compute(self) -> float:
        return max(self.seconds - self.waited, 0.0)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``spans``."""
    total = 0.0
    reached = float("-inf")
    # Overlapping spans count once: add only the time after `reached`.
    for began, ended in sorted(spans):
        total += max(ended - max(began, reached), 0.0)
        reached = max(reached, ended)
    return total
