"""Handle of a step in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from weft.common.errors import EngineDead
from weft.overlap.times import StepTimes
from weft.runner.batch.staging import StagingBuffer
from weft.runner.device_queue import Settled, Work
from weft.runner.expert_routes import StepRoutes
from weft.runner.graphs.timing import Timing
from weft.runner.pooling import Pooled
from weft.runner.result import Drawn
from weft.types.plan import StepPlan

NOT_YET = Settled(None, EngineDead("a step was not launched"))


@dataclass(slots=True)
class StepHandle:
    """A step in flight. The caller of ``forward`` owns the handle until ``read``."""

    plan: StepPlan
    launched: float
    forwarded: Work
    sampled: Work | None = None
    buffer: StagingBuffer | None = field(default=None, repr=False)
    hidden: Tensor | None = field(default=None, repr=False)
    """[T, hidden] of the tokens of the step, only if a drafter reads hidden states."""
    each: int = 0
    """Tokens per row in ``hidden``, for padded rows; 0: rows are not padded."""
    uncaptured: bool = False
    """True if the step was slower than later steps of the same bucket will be, because only later steps are
    replayed. Valid after ``read``."""
    micro_batches: list[StagingBuffer] = field(default_factory=list, repr=False)
    """Staging buffers of a step in micro-batches."""
    pooled: Pooled | None = field(default=None, repr=False)
    """Embeddings completed by the step."""
    routes: StepRoutes | None = field(default=None, repr=False)
    """Recorded routes of the step."""
    encode_seconds: float = 0.0
    """Seconds for encoding images; on a GPU, seconds to launch the encoding."""
    drawn: Drawn | None = None
    """Tokens of a step that was sampled inside its capture; else None. Valid once ``forwarded`` has ended."""
    timing: Timing | None = None
    """Measurement of a replay on the device, until ``read`` adds the time to ``times``."""
    times: StepTimes | None = None
    """Times of compute and communication, valid after ``read``; None on a rank without communication."""
