"""Predicted latency of a number of groups under a load, from the cost model of a group's step.

``weft sim plan`` simulates each deployment with the same cost model. The formulas of this module take
microseconds, so a planner can ask after every observation:

- Prompts wait in one queue for several groups (Erlang's formula C, scaled by the spread of prompt lengths).
- Decoding sequences fill the groups by Little's law: sequences = arrivals x tokens x seconds of a step.
- A unified group does both. Prompts take their share of the time, and delay the steps between two tokens.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from weft.scheduler.policy.step_cost import CostModel, StepShape

SPREAD = 0.75
"""Half of 1 + (deviation / mean) squared of the prompt lengths: the factor of a wait in a queue."""
LONG_PROMPT = 1.2
"""Seconds of a long prompt, in units of the mean prompt."""
AVERAGED = 0.7
"""Deviation of the sequences beside a request, averaged over the request, in units of the deviation at one
moment."""
FULLEST = 0.95
"""Maximum share of time in which a group computes prompts."""


class Limits(NamedTuple):
    """The promise to clients. Times in seconds."""

    ttft: float
    tpot: float
    goal: float = 0.95
    """Share of the requests within each limit."""


class Load(NamedTuple):
    """Requests per second, and their mean size in tokens."""

    rate: float
    prompt: float
    computed: float
    """Prompt tokens that are not found in a prefix cache."""
    output: float


class Predicted(NamedTuple):
    """Latency at the goal's percentile in seconds; inf for groups that cannot carry the load."""

    ttft: float = 0.0
    tpot: float = 0.0

    def within(self, limits: Limits) -> bool:
        return self.ttft <= limits.ttft and self.tpot <= limits.tpot


OVERLOADED = Predicted(math.inf, math.inf)


class Capacity:
    """Answers how many groups of a role carry a load within the limits."""

    def __init__(self, cost: CostModel, limits: Limits, tokens: int, slots: int) -> None:
        """``cost``: seconds of a step. ``tokens``: maximum tokens per step. ``slots``: maximum running
        sequences per group."""
        self.limits = limits
        self.slots = slots
        self._cost = cost
        self._tokens = tokens
        self._known: dict[tuple[int, int], float] = {}
        """Seconds of decode steps: the iteration asks for the same steps again and again."""
        self._z = NormalDist().inv_cdf(limits.goal)

    def groups(self, role: str, load: Load, most: int, slowness: float = 1.0) -> int:
        """Return the smallest number of groups of ``role`` within the limits; ``most`` if no number is.

        ``slowness``: measured seconds of a step, in units of the cost model's seconds.
        """
        for groups in range(1, most):
            if self.predict(role, load, groups, slowness).within(self.limits):
                return groups
        return most

    def predict(self, role: str, load: Load, groups: int, slowness: float = 1.0) -> Predicted:
        """Return the latency of ``groups`` groups of ``role`` (prefill, decode or unified)."""
        if load.rate <= 0:
            return Predicted()
        if role == "prefill":
            return Predicted(ttft=self._first_token(load, groups, slowness * self._prompt_seconds(load)))
        if role == "decode":
            rows = self._rows(load, groups, slowness, 0.0)
            return OVERLOADED if rows is None else Predicted(tpot=self._step(rows, load) * slowness)
        return self._unified(load, groups, slowness)

    def step_seconds(self, shape: StepShape) -> float:
        """Return the cost model's seconds of a step."""
        return self._cost.predict(shape)

    def _unified(self, load: Load, groups: int, slowness: float) -> Predicted:
        # Prompts share steps with decode rows, so the constant of a step counts once, in the decode part.
        prompt = slowness * (self._prompt_seconds(load) - self._cost.predict(StepShape()))
        share = load.rate * prompt / groups
        rows = self._rows(load, groups, slowness, share)
        if rows is None:
            return OVERLOADED
        step = slowness * self._step(rows, load)
        seconds = max(load.output - 1, 1) * step / (1 - share)
        # Prompts that come while a request decodes delay its tokens.
        others = load.rate / groups * seconds
        delay = prompt * (others + self._z * math.sqrt(others)) / max(load.output - 1, 1)
        return Predicted(self._first_token(load, groups, prompt) + step, step + delay)

    def _first_token(self, load: Load, groups: int, seconds: float) -> float:
        """Return the TTFT at the goal's percentile. ``seconds``: of a mean prompt alone."""
        busy = load.rate * seconds
        if busy >= FULLEST * groups:
            return math.inf
        waits = _erlang_c(groups, busy)
        beyond = max(waits / (1 - self.limits.goal), 1.0)
        return LONG_PROMPT * seconds + seconds * SPREAD / (groups - busy) * math.log(beyond)

    def _rows(self, load: Load, groups: int, slowness: float, share: float) -> float | None:
        """Return the decoding sequences of a group, at a bad moment; None if they exceed the slots.

        ``share``: share of the time in which the group computes prompts.
        """
        if share >= FULLEST:
            return None
        each = load.rate * load.output / groups * slowness / (1 - share)
        rows = 0.0
        # The seconds of a step grow with the rows: the iteration rises to the smallest fixed point.
        for _ in range(200):
            found = each * self._step(rows, load)
            if found > self.slots:
                return None
            if found - rows < 0.01:
                break
            rows = found
        rows += self._z * AVERAGED * math.sqrt(rows)
        return rows if rows <= self.slots else None

    def _step(self, rows: float, load: Load) -> float:
        """Return the seconds of a step of ``rows`` decode rows, linear between two whole numbers."""
        context = round(load.prompt + load.output / 2)
        low = max(int(rows), 1)
        below, above = self._decode_seconds(low, context), self._decode_seconds(low + 1, context)
        return below + (above - below) * (max(rows, 1.0) - low)

    def _decode_seconds(self, count: int, context: int) -> float:
        """Return the seconds of a step of ``count`` decode rows with ``context`` cached positions each."""
        key = (count, context)
        if key not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            shape = StepShape(decode_rows=count, decode_tokens=count, decode_pairs=count * context)
            self._known[key] = self._cost.predict(shape)
        return self._known[key]

    def _prompt_seconds(self, load: Load) -> float:
        """Return the seconds of the steps that compute a mean prompt alone."""
        start, left, seconds = max(round(load.prompt - load.computed), 0), max(round(load.computed), 1), 0.0
        while left > 0:
            count = min(left, self._tokens)
            seconds += self._cost.predict(StepShape().with_chunk(start, count))
            start, left = start + count, left - count
        return seconds


def _erlang_c(groups: int, busy: float) -> float:
    """Return the share of arrivals that wait. ``busy``: mean number of busy groups, below ``groups``."""
    blocked = 1.0
    for number in range(1, groups + 1):  # Erlang's formula B, by recursion
        blocked = busy * blocked / (number + busy * blocked)
    return blocked / (1 - busy / groups * (1 - blocked))
