"""Choose steps to compute in micro-batches. The engine process decides; the plan informs every rank.

    off        none
    prefill    steps with prompts, if splittable
    all        all splittable steps
    auto       steps with prompts and many tokens, if communication takes a large share of such steps

``auto`` measures the share on whole steps, by powers of two of tokens. The time of a step in micro-batches is
not measured. Decode steps stay whole: both micro-batches read all weights, and on CPUs only whole decode steps
are captured.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from weft.config.sections.all import ParallelSection
from weft.overlap.split import splits
from weft.overlap.times import StepTimes
from weft.scheduler.plan_builder import PlanBuilder
from weft.types.plan import PlannedRows, StepPlan

TOKENS = 128
"""Minimum tokens of a step in micro-batches (mode ``auto``)."""
SHARE = 0.15
"""Minimum share of communication in a whole step (mode ``auto``). The second micro-batch reads all weights
again, so a smaller share does not pay."""
LATEST, WARM = 8, 4
"""Number of latest measured shares of a class, and number of shares before the first decision. The median
decides."""
WHOLE_EVERY = 32
"""One of so many steps of a class in micro-batches is computed whole, to measure the share again."""


def mode_of(parallel: ParallelSection | None, device: str = "cpu") -> str:
    """Return the effective mode for ``parallel``: "off" without configuration or without communicating ranks.

    ``auto`` becomes "off" on a GPU: ``auto`` uses host times, but on a GPU the host only launches work.
    """
    if device == "cuda" and parallel is not None and parallel.overlap == "auto":
        return "off"
    if parallel is None:
        return "off"
    ranks = parallel.tensor_parallel_size
    if parallel.enable_expert_parallel:
        ranks *= parallel.data_parallel_size
    return parallel.overlap if ranks > 1 else "off"


@dataclass(slots=True)
class _StepClass:
    """A class of similar steps."""

    shares: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Shares of communication in the latest whole steps."""
    steps: int = 0
    """Number of decisions for the class."""


class OverlapPolicy:
    """Decides for one engine process and counts the effects."""

    def __init__(self, mode: str = "off") -> None:
        """``mode``: a result of ``mode_of``."""
        self.mode = mode
        self.steps = 0
        """Number of steps computed in micro-batches."""
        self.communication = self.hidden = 0.0
        """Seconds on this rank with a collective in flight, and the part hidden under compute."""
        self._classes: dict[int, _StepClass] = {}
        """Number of bits of the number of tokens -> class (mode ``auto``)."""

    def ask(self, builder: PlanBuilder) -> None:
        """Set ``builder.micro_batches`` for the step."""
        builder.micro_batches = 1 + self.wants(builder)

    def wants(self, plan: PlannedRows) -> bool:
        """Return True if the plan should be computed in micro-batches.

        An idle replica agrees with the others.

        In mode ``auto`` the call counts toward the statistics of the plan's class, so call once per plan.
        """
        if self.mode == "off":
            return False
        # An empty plan has two empty micro-batches, so agreeing costs nothing.
        if not plan.rows:
            return True
        if self.mode == "prefill":
            return plan.prefill.rows > 0 and splits(plan)
        if self.mode == "all":
            return splits(plan)
        return self._pays(plan)

    def observe(self, plan: StepPlan, times: StepTimes | None) -> None:
        """Add the communication of a completed step to the counters; in mode ``auto`` also learn from the
        step. ``times`` is None on a single rank: nothing is recorded.
        """
        if times is None:
            return
        self.steps += times.micro_batches > 1
        self.communication += times.communication + sum(flight.seconds for flight in times.drafting)
        self.hidden += times.hidden
        if self.mode == "auto" and _large(plan) and times.micro_batches == 1 and times.seconds > 0.0:
            self._class(plan).shares.append(times.communication / times.seconds)

    def describe(self) -> str | None:
        """Return a log line; None if nothing communicated."""
        if not self.communication:
            return None
        share = self.hidden / self.communication
        return (
            f"overlap {self.mode}: {self.steps} steps in micro-batches; "
            f"{share:.0%} of {self.communication:.2f} s of communication went on under compute"
        )

    def _pays(self, plan: PlannedRows) -> bool:
        """Return True if communication takes enough of steps like ``plan`` (mode ``auto``)."""
        if not _large(plan) or not splits(plan):
            return False
        similar = self._class(plan)
        similar.steps += 1
        if len(similar.shares) < WARM or similar.steps % WHOLE_EVERY == 0:
            return False
        return median(similar.shares) >= SHARE

    def _class(self, plan: PlannedRows) -> _StepClass:
        return self._classes.setdefault(plan.tokens.bit_length(), _StepClass())


def _large(plan: PlannedRows) -> bool:
    """Return True if the plan has prompts and enough tokens for mode ``auto``."""
    return plan.prefill.rows > 0 and plan.tokens >= TOKENS
