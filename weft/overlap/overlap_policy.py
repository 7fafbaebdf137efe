"""Choose steps to compute in micro-batches. The engine process decides; the plan informs every rank.

    off        none
    prefill    steps with prompts, if splittable
    all        all splittable steps
    auto       steps for which measured costs predict a gain (``weft.overlap.overlap_cost``)

``auto`` starts with whole steps. A class of steps switches to micro-batches if the predicted saving is at
least ``ENTER``, and back if the saving falls below ``LEAVE``. Without trials the prediction has no
correction, so a class is tried for a few steps. After a failed trial, the next trial of the class waits twice
as long. A class in micro-batches computes a whole step now and then, to keep both forms measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.config.sections.all import ParallelSection
from weft.overlap.overlap_cost import LATEST, OverlapCost, Ratios
from weft.overlap.split import split, splits
from weft.overlap.times import StepTimes
from weft.scheduler.plan_builder import PlanBuilder
from weft.types.plan import PlannedRows, StepPlan

ENTER, LEAVE = 0.05, 0.01
"""Minimum saving by micro-batches, as shares of step time: to start, and to continue."""
FEW = 3
"""Number of steps in micro-batches in a trial of a class."""
WARM = 4
"""Number of whole steps of a class before the first step in micro-batches."""
WHOLE_EVERY = 32
"""One of so many steps of a class in micro-batches is computed whole."""
NOW_AND_THEN = 8
"""One of so many steps of a known class is evaluated."""
RETRY_FIRST, RETRY_LAST = 256, 8192
"""First and maximum number of whole steps of a class between two trials."""


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

    whole: Ratios = field(default_factory=Ratios)
    overlapped: Ratios = field(default_factory=Ratios)
    pays: bool = False
    steps: int = 0
    """Number of steps since the last change of form or trial."""
    retry: int = RETRY_FIRST
    observed: int = 0


class OverlapPolicy:
    """Decides for one engine process and counts the effects."""

    def __init__(self, mode: str = "off") -> None:
        """``mode``: a result of ``mode_of``."""
        self.mode = mode
        self.steps = 0
        """Number of steps computed in micro-batches."""
        self.communication = self.hidden = 0.0
        """Seconds on this rank with a collective in flight, and the part hidden under compute."""
        self._cost = OverlapCost()
        self._kinds: dict[tuple[int, ...], _StepClass] = {}

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
        return splits(plan) and self._pays(plan)

    def observe(self, plan: StepPlan, times: StepTimes | None) -> None:
        """Add the communication of a completed step to the counters; in mode ``auto`` also learn from the
        step. ``times`` is None on a single rank: nothing is recorded.
        """
        if times is None:
            return
        self.steps += times.micro_batches > 1
        self.communication += times.communication + sum(flight.seconds for flight in times.drafting)
        self.hidden += times.hidden
        if self.mode == "auto" and plan.rows:
            self._learn(plan, times)

    def _learn(self, plan: StepPlan, times: StepTimes) -> None:
        """Learn from a step: add its time to the statistics of its class, and fit the cost model to whole
        steps. If the form of the class is known, learn from one of ``NOW_AND_THEN`` steps.
        """
        kind = self._kind(plan)
        overlapped = times.micro_batches > 1
        ratios = kind.overlapped if overlapped else kind.whole
        kind.observed += 1
        # Enough measurements of the form in use; the other form is always worth a measurement.
        known = len(ratios.seen) >= LATEST and overlapped == kind.pays
        if known and kind.observed % NOW_AND_THEN:
            return
        if overlapped:
            micro_batches = split(plan)
            assert micro_batches is not None
            kind.overlapped.add(times.seconds, self._cost.overlapped(micro_batches))
            return
        if self._cost.ready:
            kind.whole.add(times.seconds, self._cost.whole(plan))
        self._cost.observe(plan, times)

    def describe(self) -> str | None:
        """Return a log line; None if nothing communicated."""
        if not self.communication:
            return None
        share = self.hidden / self.communication
        return (
            f"overlap {self.mode}: {self.steps} steps in micro-batches; "
            f"{share:.0%} of {self.communication:.2f} s of communication went on under compute"
        )

    def saves(self, plan: PlannedRows) -> float:
        """Return the predicted share of step time saved by micro-batches; negative if micro-batches cost
        time.

        At most the share of communication, even if the compute model is wrong.
        """
        micro_batches = split(plan)
        if micro_batches is None or not self._cost.ready:
            return 0.0
        kind = self._kind(plan)
        whole = self._cost.whole(plan) * kind.whole.factor
        if whole <= 0.0:
            return 0.0
        saved = 1.0 - self._cost.overlapped(micro_batches) * kind.overlapped.factor / whole
        return min(saved, self._cost.share(plan))

    def _pays(self, plan: PlannedRows) -> bool:
        """Return True if class statistics favor micro-batches for ``plan`` (mode ``auto``).

        Updates the trial state of the class.

        A prediction takes part of a millisecond, so a known class is evaluated only now and then.
        """
        kind = self._kind(plan)
        kind.steps += 1
        if not kind.pays:
            return self._may_enter(kind, plan)
        tried = len(kind.overlapped.seen)
        # During a trial: measure before judging.
        if tried < FEW:
            return True
        if (tried < LATEST or kind.steps % NOW_AND_THEN == 0) and self.saves(plan) < LEAVE:
            kind.pays = False
            kind.steps = 0
            kind.retry = min(2 * kind.retry, RETRY_LAST)
            return False
        if kind.steps >= kind.retry:  # micro-batches have paid for long
            kind.retry = RETRY_FIRST
        return kind.steps % WHOLE_EVERY != 0

    def _may_enter(self, kind: _StepClass, plan: PlannedRows) -> bool:
        """Return True if a trial of micro-batches begins for the class ``kind``.

        A new trial forgets the old measurements.
        """
        if len(kind.whole.seen) < WARM or (kind.steps > LATEST and kind.steps % NOW_AND_THEN):
            return False
        if kind.overlapped.seen and kind.steps >= kind.retry:  # a new trial: forget the old measurements
            kind.overlapped.seen.clear()
            kind.steps = 0
        if self.saves(plan) < ENTER:
            return False
        kind.pays = True
        kind.steps = 0
        return True

    def _kind(self, plan: PlannedRows) -> _StepClass:
        """Return the class of the plan: powers of two of prompt tokens, decode rows and drafts."""
        rows = plan.decode.rows
        tokens = plan.decode.tokens
        key = (plan.prefill.tokens.bit_length(), rows.bit_length(), (tokens - rows).bit_length())
        return self._kinds.setdefault(key, _StepClass())
