"""A simulated device: a cost model gives the time of each step, and sampled ids are arbitrary."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from weft.common.clock import VirtualClock
from weft.engine.loop import Executor
from weft.scheduler.policy.step_cost import CostModel, shape_of
from weft.sim.images import patches_in
from weft.sim.timeline import TimelineClock
from weft.types.plan import StepPlan, StepResult, column


class FakeDevice:
    """Runs steps one after another, in launch order."""

    def __init__(
        self,
        cost: CostModel,
        vocabulary: int,
        noise: float = 0.0,
        seed: int = 0,
        acceptance: float = 1.0,
        patch_seconds: float = 0.0,
    ) -> None:
        """Create an idle device. ``noise``: standard deviation of log(step time); the median is the cost
        model's.

        ``acceptance``: probability of a draft to be accepted if all earlier drafts of the row were.
        ``patch_seconds``: seconds to encode one image patch. If more than 0, a step without rows takes only
        the time of its patches.
        """
        self.busy = 0.0
        """Seconds of computing so far."""
        self._cost = cost
        self._vocabulary = vocabulary
        self._noise = noise
        self._rng = random.Random(seed)
        self._acceptance = acceptance
        self._patch_seconds = patch_seconds
        self._drafts = np.random.default_rng(seed)
        self._free_at = 0.0

    def launch(self, plan: StepPlan, now: float) -> float:
        """Launch ``plan`` after all earlier steps.

        Return the completion time, in seconds of the caller's clock. Adds to ``busy``.
        """
        seconds = patches_in(plan) * self._patch_seconds
        if plan.rows or not self._patch_seconds:
            seconds += self._cost.predict(shape_of(plan))
        if self._noise:
            seconds *= self._rng.lognormvariate(0.0, self._noise)
        self.busy += seconds
        self._free_at = max(now, self._free_at) + seconds
        return self._free_at

    def result(self, plan: StepPlan) -> StepResult:
        """Return the sampled ids of the step, which depend only on the step's number and the row.

        Draws the accepted drafts at random, so call once per plan.
        """
        both = (plan.prefill, plan.decode)
        logits = np.concatenate([segment.logits for segment in both])
        sample = np.concatenate([segment.sample for segment in both])
        rows = np.flatnonzero(logits)
        sampled = sample[rows]
        offsets = np.concatenate([[0], np.cumsum(sampled)])
        numbers = np.arange(int(sampled.sum()), dtype=np.int64)
        return StepResult(
            step=plan.step,
            rows=column(rows),
            offsets=column(offsets),
            tokens=column((numbers * 2654435761 + plan.step * 40503) % self._vocabulary),
            accepted=column(self._accepted(np.maximum(sampled - 1, 0))),
        )

    def _accepted(self, drafts: np.ndarray) -> np.ndarray:
        """Return the accepted drafts of each row, up to the first wrong one. ``drafts``: int [rows]."""
        if not drafts.any():
            return drafts
        # [rows, most drafts]: drafts of a row are right up to the first miss.
        right = self._drafts.random((len(drafts), int(drafts.max()))) < self._acceptance
        accepted: np.ndarray = np.minimum(right.cumprod(axis=1).sum(axis=1), drafts)
        return accepted


class FakeStep(NamedTuple):
    """A step on a fake device."""

    plan: StepPlan
    complete: float
    """Time of completion."""


class FakeRanks(Executor[FakeStep]):
    """The executor of a fake device: steps only take time on ``clock``."""

    def __init__(self, device: FakeDevice, clock: VirtualClock | TimelineClock, host: float = 0.0) -> None:
        """``host``: seconds for planning and committing one step."""
        self._device = device
        self._clock = clock
        self._host = host

    def forward(self, plan: StepPlan) -> FakeStep:
        """Launch ``plan`` after the planning."""
        self._clock.advance_to(self._clock.now() + self._host)
        return FakeStep(plan, self._device.launch(plan, self._clock.now()))

    def read(self, handle: FakeStep) -> StepResult:
        """Move the clock to the end of the step, and return the result."""
        self._clock.advance_to(handle.complete)
        return self._device.result(handle.plan)
