"""Choose the faster form of captured decode steps by times of the device: whole, or in micro-batches.

Each bucket of decode steps has a trial. The first steps of a bucket are whole. Then the two forms alternate
until each form has enough times, and the faster form computes all later steps of the bucket:

    step    1 .. SETTLED    SETTLED + 1, + 2, ..            later
    form    whole           micro-batches, whole, ..        the faster form

Steps that are never replayed have no times. Without a time of a whole step, no step runs in micro-batches.
The steps of a trial are steps of requests, so a trial computes nothing twice, and contexts, experts and
communication are those of the load. Pure: the caller measures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from weft.types.messages import OverlapChoice

SETTLED = 16
"""Whole steps of a bucket before the first step in micro-batches. Rare buckets therefore have no trial."""
TIMES = 8
"""Latest times of each form that decide."""
FASTER = 0.97
"""Maximum time of micro-batches, as a share of the time of whole steps. A smaller gain could be noise."""
MOST = 96
"""Maximum steps of a trial. Without enough times by then, the bucket stays whole."""


class Bucket(NamedTuple):
    """Bucket of captured decode steps, in either form."""

    rows: int
    each: int
    """Tokens per row."""
    context: int
    """Maximum number of positions of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Result of a trial, with the median times in seconds; None for a form without times."""

    micro_batches: bool
    whole_seconds: float | None
    micro_batch_seconds: float | None

    def describe(self, bucket: Bucket) -> str:
        """Return a log line."""
        size = f"{bucket.rows} rows (tokens per row: {bucket.each}, positions: {bucket.context})"
        form = "in micro-batches" if self.micro_batches else "whole"
        times = f"{_text(self.whole_seconds)} whole, {_text(self.micro_batch_seconds)} in micro-batches"
        return f"overlap: decode steps of up to {size} are computed {form} (medians: {times})"

    def message(self, bucket: Bucket) -> OverlapChoice:
        """Return the choice as a part of ``EngineStats``."""
        return OverlapChoice(
            rows=bucket.rows,
            each=bucket.each,
            context=bucket.context,
            micro_batches=self.micro_batches,
            whole_seconds=self.whole_seconds,
            micro_batch_seconds=self.micro_batch_seconds,
        )


def _text(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.3f} ms"


def choose(whole: Sequence[float], micro_batches: Sequence[float]) -> Choice:
    """Return the choice for times of both forms, in seconds. Micro-batches must be faster by a margin
    (``FASTER``)."""
    one, two = (median(times) if times else None for times in (whole, micro_batches))
    faster = one is not None and two is not None and two < FASTER * one
    return Choice(micro_batches=faster, whole_seconds=one, micro_batch_seconds=two)


def _latest() -> deque[float]:
    return deque(maxlen=TIMES)


@dataclass(slots=True)
class BucketTrial:
    """Trial of one bucket."""

    choice: Choice | None = None
    """None until the trial ends."""
    steps: int = 0
    """Steps that the trial has assigned to a form."""
    whole: deque[float] = field(default_factory=_latest)
    micro_batches: deque[float] = field(default_factory=_latest)

    def next(self) -> bool:
        """Return True if the next step runs in micro-batches. Call once per step. Ends the trial after
        ``MOST`` steps."""
        if self.choice is not None:
            return self.choice.micro_batches
        if self.steps >= MOST:
            self.choice = choose(self.whole, ())
            return False
        self.steps += 1
        return self.steps > SETTLED and (self.steps - SETTLED) % 2 == 1 and bool(self.whole)

    def observe(self, micro_batches: bool, seconds: float) -> None:
        """Add the time of a step. Steps without a time, for example captured steps, are not observed."""
        if self.choice is not None:
            return
        (self.micro_batches if micro_batches else self.whole).append(seconds)
        if len(self.whole) == len(self.micro_batches) == TIMES:
            self.choice = choose(self.whole, self.micro_batches)
