"""Predict whether micro-batches pay for a step, from measured steps.

C is the compute and M the communication of a step; 1 and 2 are the micro-batches:

    whole               C + M
    in micro-batches    max(C1 + C2, C1 + M1, C2 + M2)      all communication of one micro-batch runs under
                                                            the compute of the other, as far as possible

C comes from the cost model of steps, fitted to the compute of whole steps; M is linear in tokens. Both
formulas have a different error for every class of step: micro-batches read all weights twice, a link may be
idle or not, threads compete for cores. So each formula is corrected by the measured times of steps of the
same class, whole and in micro-batches.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from weft.overlap.split import MicroBatches
from weft.overlap.times import StepTimes
from weft.scheduler.policy.fit import CostFitter, solve_non_negative
from weft.scheduler.policy.step_cost import shape_of
from weft.types.plan import PlannedRows

LATEST = 8
"""Number of latest steps of a class; a correction is the median."""
LINKS = 128
"""Number of latest steps used to fit the line of communication."""


class LinkFit:
    """Seconds as ``a + b * tokens``, both >= 0, fitted to the latest observations by relative error."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=LINKS)
        self._fitted: tuple[float, float] | None = (0.0, 0.0)

    def observe(self, tokens: int, seconds: float) -> None:
        """Record one step. Times <= 0 are ignored."""
        if seconds > 0.0:
            self._seen.append((float(tokens), seconds))
            self._fitted = None

    def predict(self, tokens: int) -> float:
        """Return the predicted seconds; 0 before the first observation. Fits again after new observations."""
        if self._fitted is None:
            x, y = np.array(self._seen).T
            # [n, 2], features (1, tokens) divided by the measured seconds
            share = np.stack([1.0 / y, x / y], axis=1)
            # Scale both features to 1, so that one small ridge term suits both.
            size = np.maximum(share.max(axis=0), 1e-300)
            share = share / size
            found = solve_non_negative(share.T @ share + 1e-6 * np.eye(2), share.sum(axis=0)) / size
            self._fitted = float(found[0]), float(found[1])
        return self._fitted[0] + self._fitted[1] * tokens


class Ratios:
    """Ratios of observed to predicted seconds of the latest steps."""

    def __init__(self) -> None:
        self.seen: deque[float] = deque(maxlen=LATEST)

    def add(self, observed: float, predicted: float) -> None:
        """Record one step. Values <= 0 are ignored."""
        if observed > 0.0 and predicted > 0.0:
            self.seen.append(observed / predicted)

    @property
    def factor(self) -> float:
        """The median ratio; 1 before the first observation."""
        return float(np.median(self.seen)) if self.seen else 1.0


class OverlapCost:
    """Predicts the seconds of a step, whole and in micro-batches. Learns from whole steps."""

    def __init__(self) -> None:
        self._compute = CostFitter()
        self._link = LinkFit()

    @property
    def ready(self) -> bool:
        """True after the first observation."""
        return self._compute.observations > 0

    def observe(self, plan: PlannedRows, times: StepTimes) -> None:
        """Record the times of a step that was computed whole."""
        self._compute.observe(shape_of(plan), times.compute)
        self._link.observe(plan.tokens, times.communication)

    def whole(self, plan: PlannedRows) -> float:
        """Return the predicted seconds of the whole step."""
        return self._compute.model.predict(shape_of(plan)) + self._link.predict(plan.tokens)

    def share(self, plan: PlannedRows) -> float:
        """Return the predicted share of communication in a whole step: the upper bound of what overlap can
        hide."""
        whole = self.whole(plan)
        return self._link.predict(plan.tokens) / whole if whole > 0.0 else 0.0

    def overlapped(self, micro_batches: MicroBatches) -> float:
        """Return the predicted seconds in micro-batches."""
        parts = (micro_batches.first, micro_batches.second)
        compute = [self._compute.model.predict(shape_of(part)) for part in parts]
        links = [self._link.predict(part.tokens) for part in parts]
        return max(sum(compute), *(c + m for c, m in zip(compute, links, strict=True)))
