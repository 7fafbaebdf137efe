"""Choose steps to compute in micro-batches. The engine process decides; the plan informs every rank.

    off        none
    prefill    steps with prompts, if splittable
    all        all splittable steps
    auto       steps with prompts, in the form that was faster for similar steps
    measured   ``auto`` on GPUs: captured decode steps, in the form that was faster on the device

``auto`` measures both forms of steps with prompts, whole and in micro-batches, by powers of two of tokens.
The first steps are whole. Micro-batches are tried only where communication takes ``SHARE`` of a whole step.
Then the faster form computes all steps except one in ``OTHER_EVERY``. Decode steps stay whole: a decode step
in micro-batches reads all weights twice, and on CPUs only whole decode steps are captured.

On a GPU the host measures only launches, so ``measured`` takes times of replayed steps on the device of this
rank. A step ends on no rank before its last collective, so these times include the waits for slower ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from weft.common.log import get_logger
from weft.config.sections.all import ParallelSection
from weft.overlap.bucket_trials import Bucket, BucketTrial, Choice
from weft.overlap.split import splits
from weft.overlap.times import StepTimes
from weft.scheduler.plan_builder import PlanBuilder
from weft.types.plan import PlannedRows, StepPlan

log = get_logger(__name__)

SHARE = 0.06
"""Minimum share of communication in whole steps for a trial of micro-batches."""
LATEST, FEW = 8, 4
"""Number of latest times of a form; the median counts. Number of times before a decision."""
OTHER_EVERY = 32
"""One of so many steps of a class is computed in the slower form, to measure the form again."""
FASTER = 0.98
"""Maximum time of micro-batches, as a share of the time of whole steps."""


def mode_of(parallel: ParallelSection | None, device: str = "cpu") -> str:
    """Return the effective mode for ``parallel``: "off" without configuration or without communicating ranks.

    ``auto`` becomes "measured" on GPUs, and "off" for replicas that share experts: their steps in
    micro-batches are not captured.
    """
    if parallel is None:
        return "off"
    shares = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    if parallel.tensor_parallel_size == 1 and not shares:
        return "off"
    if device == "cuda" and parallel.overlap == "auto":
        return "off" if shares else "measured"
    return parallel.overlap


@dataclass(slots=True)
class _StepClass:
    """A class of steps with prompts."""

    whole: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Seconds per token of the latest whole steps."""
    overlapped: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Seconds per token of the latest steps in micro-batches."""
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Shares of communication in the latest whole steps."""
    steps: int = 0
    """Number of decisions for the class."""

    def overlaps(self) -> bool:
        """Return True if the next step of the class runs in micro-batches."""
        self.steps += 1
        if len(self.whole) < FEW or median(self.shares) < SHARE:
            return False
        if len(self.overlapped) < FEW:
            return True
        faster = median(self.overlapped) < FASTER * median(self.whole)
        return faster != (self.steps % OTHER_EVERY == 0)


class OverlapPolicy:
    """Decides for one engine process and counts the effects."""

    def __init__(
        self, mode: str = "off", bucket_of: Callable[[PlannedRows], Bucket | None] | None = None
    ) -> None:
        """``mode``: a result of ``mode_of``. ``bucket_of``: returns the bucket of a plan for mode
        ``measured``, None for a plan that stays whole."""
        self.mode = mode
        self._bucket_of = bucket_of
        self.steps = 0
        """Number of steps computed in micro-batches."""
        self.communication = self.hidden = 0.0
        """Seconds on this rank with a collective in flight, and the part hidden under compute."""
        self._classes: dict[int, _StepClass] = {}
        """Bits of the number of tokens -> class (mode ``auto``)."""
        self._trials: dict[Bucket, BucketTrial] = {}
        """Trials of mode ``measured``."""
        self._trying: set[int] = set()
        """Numbers of the steps in micro-batches of open trials that have not completed."""

    @property
    def choices(self) -> dict[Bucket, Choice]:
        """Ended trials of mode ``measured``."""
        return {bucket: one.choice for bucket, one in self._trials.items() if one.choice is not None}

    def ask(self, builder: PlanBuilder) -> None:
        """Set ``builder.micro_batches`` for the step."""
        builder.micro_batches = 1 + self.wants(builder)

    def wants(self, plan: PlannedRows) -> bool:
        """Return True if the plan should be computed in micro-batches. A plan without rows agrees with every
        decision of other replicas; in the mode ``measured`` there are none.

        In the modes ``auto`` and ``measured`` the call counts toward the statistics of the plan's class, so
        call once per plan.
        """
        if self.mode == "off":
            return False
        if self.mode == "measured":
            return self._tries(plan)
        # An empty plan has two empty micro-batches, so agreeing costs nothing.
        if not plan.rows:
            return True
        if self.mode != "all" and not plan.prefill.rows:
            return False
        return splits(plan) and (self.mode != "auto" or self._class(plan).overlaps())

    def tries(self, plan: StepPlan) -> bool:
        """Return True if a trial of mode ``measured`` computes the step in micro-batches. Later steps may be
        faster, so the time fits no cost model. Call before ``observe``."""
        return plan.step in self._trying

    def observe(self, plan: StepPlan, times: StepTimes | None) -> None:
        """Add the communication of a completed step to the counters; in the modes ``auto`` and ``measured``
        also learn from the step. ``times`` is None on a single rank: nothing is recorded.
        """
        if times is None:
            return
        self.steps += times.micro_batches > 1
        self.communication += times.communication + sum(flight.seconds for flight in times.drafting)
        self.hidden += times.hidden
        if self.mode == "measured":
            self._trying.discard(plan.step)
            if times.device is not None:
                self._add(plan, times.micro_batches > 1, times.device)
        if self.mode != "auto" or not plan.prefill.rows or times.seconds <= 0.0:
            return
        similar = self._class(plan)
        if times.micro_batches > 1:
            similar.overlapped.append(times.seconds / plan.tokens)
        else:
            similar.whole.append(times.seconds / plan.tokens)
            similar.shares.append(times.communication / times.seconds)

    def lose(self) -> None:
        """Drop the trials of mode ``measured`` after a loss of the group. Captures end with the epoch, and
        the next epoch may have other ranks.

        If a step in micro-batches of an open trial has not completed, all later steps are whole.
        Micro-batches may be the reason of the loss, and the loss would come again in every epoch.
        """
        if self._trying:
            self._bucket_of = None
            log.warning(
                "overlap: all steps are whole from now on, because the group was lost in a trial of "
                "micro-batches; --overlap off switches the trials off"
            )
        self._trying.clear()
        self._trials.clear()

    def describe(self) -> str | None:
        """Return a log line; None if nothing communicated."""
        if not self.communication:
            return None
        share = self.hidden / self.communication
        return (
            f"overlap {self.mode}: {self.steps} steps in micro-batches; "
            f"{share:.0%} of {self.communication:.2f} s of communication overlapped with compute"
        )

    def _splittable(self, plan: PlannedRows) -> Bucket | None:
        """Return the bucket of a decode step that can be split; None for other steps."""
        if self._bucket_of is None or plan.prefill.rows or plan.decode.rows < 2:
            return None
        return self._bucket_of(plan)

    def _tries(self, plan: PlannedRows) -> bool:
        """Return the form of a step in mode ``measured``: True for micro-batches."""
        bucket = self._splittable(plan)
        if bucket is None:
            return False
        trial = self._trials.get(bucket)
        if trial is None:
            trial = self._trials[bucket] = BucketTrial()
        if trial.choice is not None:
            return trial.choice.micro_batches
        splits_step = trial.next()
        if splits_step:
            self._trying.add(plan.step)
        self._log_end(bucket, trial)
        return splits_step

    def _add(self, plan: StepPlan, micro_batches: bool, seconds: float) -> None:
        """Add the time of a step on the device to the trial of its bucket, if the trial is open."""
        bucket = self._splittable(plan)
        trial = None if bucket is None else self._trials.get(bucket)
        if bucket is not None and trial is not None and trial.choice is None:
            trial.observe(micro_batches, seconds)
            self._log_end(bucket, trial)

    def _log_end(self, bucket: Bucket, trial: BucketTrial) -> None:
        if trial.choice is not None:
            log.info("%s", trial.choice.describe(bucket))

    def _class(self, plan: PlannedRows) -> _StepClass:
        return self._classes.setdefault(plan.tokens.bit_length(), _StepClass())
