"""What a step's time went into: compute and communication, of each micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.parallel.launcher import Flight


class Stretch(NamedTuple):
    """A micro-batch at work, from one communication point to its next. Seconds of ``time.monotonic``."""

    micro_batch: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step up to its logits on one rank. Seconds."""

    micro_batches: int
    """2 if it was computed in micro-batches."""
    seconds: float
    stretches: Sequence[Stretch] = ()
    """In order of time; of a whole step one."""
    flights: Sequence[Flight] = ()
    """Its collectives, in order of launch."""
    drafting: Sequence[Flight] = field(default=())
    """Those of sampling and drafting behind it, which nothing hides."""

    @property
    def waited(self) -> float:
        """Compute stood still for communication."""
        return sum(flight.waited for flight in self.flights)

    @property
    def communication(self) -> float:
        """At least one collective was under way."""
        return covered((flight.began, flight.ended) for flight in self.flights)

    @property
    def hidden(self) -> float:
        """Seconds of ``communication`` that went on under compute."""
        return max(self.communication - self.waited, 0.0)

    @property
    def compute(self) -> float:
        return max(self.seconds - self.waited, 0.0)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ``spans``."""
    total = 0.0
    reached = float("-inf")
    for began, ended in sorted(spans):
        total += max(ended - max(began, reached), 0.0)
        reached = max(reached, ended)
    return total
