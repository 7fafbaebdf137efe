"""Engines in lock-step: every rank of a replica has a scheduler, and all schedulers make the same plans.

Only collectives connect the ranks. Rank 0 decides on micro-batches, like an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.e0.rig import Answer, Recorder, make_engine, run, spec_of
from tests.support.ranks import on_ranks
from tests.support.slowness import deadline
from weft.engine.core import EngineCore
from weft.layers.build import ExpertOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.overlap.overlap_policy import OverlapPolicy
from weft.overlap.split import split
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout
from weft.types.messages import EngineStats, Submit
from weft.types.plan import StepPlan

CPU = torch.device("cpu")
DEADLINE = deadline(60.0)


class Decisions:
    """The decisions of rank 0 by step. The other ranks wait for each decision."""

    def __init__(self) -> None:
        self._made: dict[int, bool] = {}
        self._changed = threading.Condition()
        self._ended = False

    def decide(self, step: int, wanted: bool) -> None:
        with self._changed:
            self._made[step] = wanted
            self._changed.notify_all()

    def end(self) -> None:
        """End the decisions. Waiting ranks continue alone."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, step: int) -> bool:
        with self._changed:
            found = self._changed.wait_for(lambda: step in self._made or self._ended, DEADLINE)
            assert found, "the head decided nothing"
            return self._made.get(step, False)


class Decided(OverlapPolicy):
    """A policy that follows the decisions of rank 0."""

    def __init__(self, mode: str, rank: int, decisions: Decisions) -> None:
        super().__init__(mode)
        self._rank, self._decisions = rank, decisions

    def wants(self, plan: StepPlan) -> bool:
        if self._rank:
            return self._decisions.wait(plan.step)
        wanted = super().wants(plan)
        self._decisions.decide(plan.step, wanted)
        return wanted


@dataclass
class Ran:
    """One rank's part of a run."""

    answers: dict[int, Answer]
    stats: EngineStats
    plans: list[StepPlan] = field(default_factory=list)
    extra: Any = None

    @property
    def tokens(self) -> dict[int, list[int]]:
        return {sequence: answer.tokens for sequence, answer in sorted(self.answers.items())}

    @property
    def overlapped(self) -> int:
        return sum(plan.micro_batches > 1 for plan in self.plans)

    @property
    def cut(self) -> int:
        """Steps in micro-batches in which a prompt was cut."""
        return sum(plan.micro_batches > 1 and (split(plan) or (0, 0, 0))[2] > 0 for plan in self.plans)


_LOADING = threading.Lock()


def rank_model(folder: Path, mesh: Mesh, mtp: int = 0, dispatch: str = "auto") -> Decoder:
    """Return the model shard of a rank. Loads are serialized: threads share torch's default settings."""
    with _LOADING:
        model = load_model(
            str(folder),
            spec_of(folder, mtp),
            torch.float64,
            CPU,
            progress=False,
            mesh=mesh,
            experts=ExpertOptions(dispatch=dispatch),
        )
    assert isinstance(model, Decoder)
    return model


def on_engines(
    layout: Layout,
    folder: Path,
    submits: Callable[[], list[list[Submit]]],
    mode: str,
    *,
    each: Callable[[Mesh, EngineCore, Recorder], Any] | None = None,
    mtp: int = 0,
    timeout: float = DEADLINE,
    dispatch: str = "auto",
    **settings: Any,
) -> list[Ran]:
    """Run the same requests on every rank. Return the results by rank.

    ``each`` may change a rank's engine before the run; its return value is stored in ``extra``.
    """
    decisions = Decisions()

    def work(mesh: Mesh) -> Ran:
        torch.set_num_threads(1)
        model = rank_model(folder, mesh, mtp, dispatch)
        engine, runner = make_engine(folder, model=model, launcher=mesh.launcher, **settings)
        engine.overlap = Decided(mode, mesh.rank, decisions)
        extra = None if each is None else each(mesh, engine, runner)
        try:
            answers = run(engine, submits())
            return Ran(answers, engine.stats(), getattr(runner, "plans", []), extra)
        finally:
            engine.close()

    return on_ranks(layout, work, timeout)
