"""Steps in two micro-batches: two batches with their own staging buffers, one result in plan order.

    hidden of the first    [prefill 0 | decode 0]
    hidden of the second   [prefill 1 | decode 1]
    of the plan            [prefill 0 | prefill 1 | decode 0 | decode 1]

Work per plan stays undivided: the head over all rows with logits, sampling, and drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.common.errors import EngineDead
from weft.models.decoder import Model
from weft.ops.row_routes import RowRoutes
from weft.overlap.interleave import interleave
from weft.overlap.split import MicroBatches, split
from weft.overlap.times import Stretch
from weft.parallel.launcher import Launcher
from weft.runner.batch.batch import BatchBuilder
from weft.runner.batch.staging import StagingBuffer, StagingRing
from weft.runner.exports import LayerDone
from weft.types.exchange import Exchange
from weft.types.plan import PlannedRows, StepPlan

Tensor = torch.Tensor
BeginRoutes: TypeAlias = Callable[[PlannedRows, Tensor], RowRoutes | None]
"""Function from the rows of a micro-batch and their positions to their routes."""


class MicroBatchedSteps:
    """Computes plans in micro-batches for one runner, on the thread of the runner."""

    def __init__(
        self,
        model: Model,
        cache: Sequence[LayerCache],
        backends: Backends,
        builder: BatchBuilder,
        launcher: Launcher,
        ring: StagingRing,
    ) -> None:
        """``launcher``: runs the collectives of the model. ``ring``: two buffers for each step in flight."""
        self._model = model
        self._cache = cache
        self._backends = backends
        self._builder = builder
        self._launcher = launcher
        self._ring = ring
        self._turns: list[tuple[int, float]] = []

    def hidden(
        self,
        plan: StepPlan,
        buffers: list[StagingBuffer],
        begin: BeginRoutes,
        *,
        whole: bool,
        done: LayerDone | None = None,
    ) -> tuple[Tensor, list[Stretch], Tensor | None]:
        """Compute the hidden states of a plan. Return the states, the time of each stretch of compute, and
        the routes of all tokens, int64 [T, layers, k] (None without).

        States are [T, hidden] of all tokens if ``whole``, else [L, hidden] of the rows with logits, in plan
        order. ``begin`` returns the routes of a micro-batch. ``buffers`` receives the two staging buffers of
        the step; return the buffers with ``release``. ``done(layer)`` is called when the second micro-batch
        has passed the layer: the first micro-batch always passes earlier. Raises EngineDead if the plan
        cannot be split.
        """
        micro_batches = split(plan)
        if micro_batches is None:
            raise EngineDead(f"step {plan.step} is to be computed in micro-batches, and has none")
        steps = []
        exchange = exchange_of(plan, micro_batches)
        for micro_batch, cut in ((micro_batches.first, 0), (micro_batches.second, micro_batches.cut)):
            buffers.append(self._ring.acquire())
            step = self._builder.micro_batch(micro_batch, cut, exchange, buffers[-1])
            steps.append(replace(step, routes=begin(micro_batch, step.positions)))
        self._turns = []
        first, second = (
            self._model.hidden(step, self._cache, self._backends, None if whole else step.logits_index, hook)
            for step, hook in zip(steps, (None, done), strict=True)
        )
        # Collectives of one micro-batch run beside the compute of the other.
        self._launcher.threaded(True)
        try:
            made = interleave(first, second, self._turn)
        finally:
            self._launcher.threaded(False)
            self._launcher.micro_batch = 0
        return merged(made, micro_batches, whole=whole), self._stretches(), _routes(steps, micro_batches)

    def release(self, buffers: list[StagingBuffer]) -> None:
        """Return the buffers of a step to the ring after its result was read. Empties ``buffers``."""
        while buffers:
            self._ring.release(buffers.pop())

    def clear(self) -> None:
        """Reset the ring: no step is in flight."""
        self._ring.clear()

    def _turn(self, micro_batch: int) -> None:
        self._launcher.micro_batch = micro_batch
        self._turns.append((micro_batch, time.monotonic()))

    def _stretches(self) -> list[Stretch]:
        ends = [began for _, began in self._turns[1:]] + [time.monotonic()]
        return [
            Stretch(micro_batch, began, end)
            for (micro_batch, began), end in zip(self._turns, ends, strict=True)
        ]


def _routes(steps: Sequence[StepInput], micro_batches: MicroBatches) -> Tensor | None:
    """Return the routes of all tokens of both micro-batches in plan order; None without routes."""
    of = [step.routes for step in steps]
    if all(routes is None for routes in of):
        return None
    known = next(routes.made() for routes in of if routes is not None)
    # The rows of a micro-batch without routes ask for none.
    made = [
        known.new_zeros(len(step.positions), *known.shape[1:]) if routes is None else routes.made()
        for step, routes in zip(steps, of, strict=True)
    ]
    return merged(made, micro_batches, whole=True)


def exchange_of(plan: StepPlan, micro_batches: MicroBatches) -> Exchange:
    """Return the exchange for both micro-batches. Ranks use the same form for both."""
    if plan.agreed is not None:
        return Exchange(rows=plan.agreed.padded_tokens, adapted=plan.agreed.adapted)
    return Exchange(rows=max(micro_batches.first.tokens, micro_batches.second.tokens))


def merged(made: Sequence[Tensor], micro_batches: MicroBatches, *, whole: bool) -> Tensor:
    """Return the rows of both micro-batches in plan order: all tokens if ``whole``, else the rows with
    logits."""
    prefills = []
    for micro_batch in (micro_batches.first, micro_batches.second):
        prefills.append(micro_batch.prefill.tokens if whole else int(micro_batch.prefill.logits.sum()))
    # (p0, d0) and (p1, d1): prefill and decode rows of each micro-batch, each [rows, hidden]
    (p0, d0), (p1, d1) = (
        part.split([rows, len(part) - rows]) for part, rows in zip(made, prefills, strict=True)
    )
    return torch.cat([p0, p1, d0, d1])
