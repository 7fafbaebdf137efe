"""Which steps are computed in micro-batches. The head decides, and the plan says it to every rank.

    off        none
    prefill    those with prompts in them, if they split
    all        all that split
    auto       those that measured costs say it pays for (``weft.overlap.overlap_cost``)

``auto`` starts whole. A kind of step goes into micro-batches when that is predicted to save ``ENTER``, and
back when it saves less than ``LEAVE``. What was never tried is predicted without its correction, so it is
tried a few times; when that did not pay, the next trial of the kind waits twice as long. What runs in
micro-batches is computed whole now and then, so that both sides stay measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.config.sections import ParallelSection
from weft.overlap.overlap_cost import LATEST, OverlapCost, Ratios
from weft.overlap.split import split, splits
from weft.overlap.times import StepTimes
from weft.scheduler.plan_builder import PlanBuilder
from weft.types.plan import PlannedRows, StepPlan

ENTER, LEAVE = 0.05, 0.01
"""Shares of a step's time that micro-batches must save."""
FEW = 3
"""Steps of a kind in micro-batches that decide whether they pay."""
WARM = 4
"""Whole steps of a kind before the first one in micro-batches."""
WHOLE_EVERY = 32
"""Steps of a kind that runs in micro-batches, of which one is computed whole."""
NOW_AND_THEN = 8
"""Steps of a kind that is known, of which one is looked at."""
RETRY_FIRST, RETRY_LAST = 256, 8192
"""Whole steps of a kind between trials."""


def mode_of(parallel: ParallelSection | None, device: str = "cpu") -> str:
    """The mode that ``parallel`` comes to: off without a configuration, and where no ranks communicate.

    So is ``auto`` on a GPU: it goes by times of the host, which launches there and does not compute.
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
class _Kind:
    """Steps that are alike."""

    whole: Ratios = field(default_factory=Ratios)
    overlapped: Ratios = field(default_factory=Ratios)
    pays: bool = False
    steps: int = 0
    """Since the last one of the other form."""
    retry: int = RETRY_FIRST
    observed: int = 0


class OverlapPolicy:
    """Decides for one head, and counts what came of it."""

    def __init__(self, mode: str = "off") -> None:
        self.mode = mode
        self.steps = 0
        """Computed in micro-batches."""
        self.communication = self.hidden = 0.0
        """Seconds on this rank: in which collectives were under way, and of those under compute."""
        self._cost = OverlapCost()
        self._kinds: dict[tuple[int, ...], _Kind] = {}

    def ask(self, builder: PlanBuilder) -> None:
        """Has the step computed in micro-batches if that is wanted."""
        builder.micro_batches = 1 + self.wants(builder)

    def wants(self, plan: PlannedRows) -> bool:
        """Whether the plan should be computed in micro-batches. An idle replica's wants what others want."""
        if self.mode == "off":
            return False
        if not plan.rows:
            return True
        if self.mode == "prefill":
            return plan.prefill.rows > 0 and splits(plan)
        if self.mode == "all":
            return splits(plan)
        return splits(plan) and self._pays(plan)

    def observe(self, plan: StepPlan, times: StepTimes | None) -> None:
        """A step has run; None on a rank alone."""
        if times is None:
            return
        self.steps += times.micro_batches > 1
        self.communication += times.communication + sum(flight.seconds for flight in times.drafting)
        self.hidden += times.hidden
        if self.mode == "auto" and plan.rows:
            self._learn(plan, times)

    def _learn(self, plan: StepPlan, times: StepTimes) -> None:
        """Takes in a step; of a form that a kind is known in, one now and then."""
        kind = self._kind(plan)
        overlapped = times.micro_batches > 1
        ratios = kind.overlapped if overlapped else kind.whole
        kind.observed += 1
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
        """For the log; None where nothing communicated."""
        if not self.communication:
            return None
        share = self.hidden / self.communication
        return (
            f"overlap {self.mode}: {self.steps} steps in micro-batches; "
            f"{share:.0%} of {self.communication:.2f} s of communication went on under compute"
        )

    def saves(self, plan: PlannedRows) -> float:
        """Predicted: what share of the step's time micro-batches save; negative where they cost. Never more
        than the share of its communication, whatever a model of compute that is off says."""
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
        """``auto``: as the module's docstring says. A prediction takes a part of a millisecond, so what is
        known is looked at now and then."""
        kind = self._kind(plan)
        kind.steps += 1
        if not kind.pays:
            return self._may_enter(kind, plan)
        tried = len(kind.overlapped.seen)
        if tried < FEW:
            return True
        if (tried < LATEST or kind.steps % NOW_AND_THEN == 0) and self.saves(plan) < LEAVE:
            kind.pays = False
            kind.steps = 0
            kind.retry = min(2 * kind.retry, RETRY_LAST)
            return False
        if kind.steps >= kind.retry:  # it has paid for long
            kind.retry = RETRY_FIRST
        return kind.steps % WHOLE_EVERY != 0

    def _may_enter(self, kind: _Kind, plan: PlannedRows) -> bool:
        if len(kind.whole.seen) < WARM or (kind.steps > LATEST and kind.steps % NOW_AND_THEN):
            return False
        if kind.overlapped.seen and kind.steps >= kind.retry:  # a trial, as if it were the first
            kind.overlapped.seen.clear()
            kind.steps = 0
        if self.saves(plan) < ENTER:
            return False
        kind.pays = True
        kind.steps = 0
        return True

    def _kind(self, plan: PlannedRows) -> _Kind:
        """Of steps that are alike: powers of two of prompt tokens, decode rows and drafts."""
        rows = plan.decode.rows
        tokens = plan.decode.tokens
        key = (plan.prefill.tokens.bit_length(), rows.bit_length(), (tokens - rows).bit_length())
        return self._kinds.setdefault(key, _Kind())
