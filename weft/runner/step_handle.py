"""A step in flight, as whoever launches it holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from weft.common.errors import EngineDead
from weft.overlap.times import StepTimes
from weft.runner.device_queue import Settled, Work
from weft.runner.pooling import Pooled
from weft.runner.result import Drawn
from weft.runner.staging import StagingBuffer
from weft.types.plan import StepPlan

NOT_YET = Settled(None, EngineDead("a step was not launched"))


@dataclass(slots=True)
class StepHandle:
    """A step in flight. Owned by the caller of ``forward`` until ``read``, which ends it."""

    plan: StepPlan
    launched: float
    forwarded: Work
    sampled: Work | None = None
    buffer: StagingBuffer | None = field(default=None, repr=False)
    hidden: Tensor | None = field(default=None, repr=False)
    """[T, hidden] of the step's tokens, where a drafter reads them."""
    each: int = 0
    """Tokens that every row takes up there; 0: as many as it has."""
    uncaptured: bool = False
    """Whether it took longer, once it was read, than later ones of its kind will: those are replayed."""
    micro_batches: list[StagingBuffer] = field(default_factory=list, repr=False)
    """Buffers of a step in micro-batches."""
    pooled: Pooled | None = field(default=None, repr=False)
    """Embeddings that the step has completed."""
    encode_seconds: float = 0.0
    """What encoding images took (on a GPU: to launch it)."""
    drawn: Drawn | None = None
    """Of a step that was sampled as it was computed; from when ``forwarded`` has ended."""
    times: StepTimes | None = None
    """Where its time went, once it was read; None on a rank alone."""
