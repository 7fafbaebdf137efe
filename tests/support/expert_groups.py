"""Run whole layouts as threads of one process: one scheduler per replica, and ranks that follow the engine.

Everything except the processes is real: gloo groups, agreement, runners over shares, dispatch, overlap.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tests.e0 import rig
from tests.support.automata import Automata
from tests.support.slowness import deadline
from weft.engine.core import EngineCore
from weft.engine.expert_group import ExpertGroup
from weft.layers.build import ExpertOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.overlap.overlap_policy import OverlapPolicy
from weft.parallel.agreement import AgreementGroup
from weft.parallel.group_comm import CommLost
from weft.parallel.mesh import Mesh, make_mesh
from weft.parallel.wakeup import LocalWakeups
from weft.runner.runner import Runner
from weft.types.layout import Layout
from weft.types.messages import EngineStats, Submit
from weft.types.plan import StepPlan, StepResult, TokenMasks

DEADLINE = deadline(180.0)
"""Maximum seconds for a whole run, and for any wait for another rank."""


@dataclass
class Replica:
    """Hold the results of one replica."""

    answers: dict[int, rig.Answer]
    stats: EngineStats
    plans: list[StepPlan] = field(default_factory=list)
    deepest: int = 0
    runner: Any = None

    @property
    def overlapped(self) -> int:
        return sum(plan.micro_batches > 1 for plan in self.plans)


class Leads(Runner):
    """Pass every plan to the replica's other ranks and compare the results. A mixin for runners."""

    plans_of: list[queue.Queue[Any]]
    """Queues of plans, one per follower. A constrained plan is followed by its masks; None ends a queue."""
    results: queue.Queue[StepResult]

    def sample(self, handle: Any, masks: TokenMasks | None = None) -> None:
        for one in self.plans_of if masks is not None else ():
            one.put(masks)
        super().sample(handle, masks)

    def forward(self, plan: StepPlan) -> Any:
        for one in self.plans_of:
            one.put(plan)
        return super().forward(plan)

    def read(self, handle: Any) -> StepResult:
        result = super().read(handle)
        for _ in self.plans_of:
            other = self.results.get(timeout=DEADLINE)
            assert other.step == result.step
            assert other.tokens.tolist() == result.tokens.tolist()
            assert other.accepted.tolist() == result.accepted.tolist()
            assert (other.drafts is None) == (result.drafts is None)
        return result


class Leading(Leads, rig.Recorder):
    """Lead the ranks of an engine of ``tests.e0.rig``."""


Make: TypeAlias = Callable[[Mesh], tuple[Any, Any]]
"""Builds a rank's engine and runner over its share of the model. Ranks call the function one at a time."""
EachTurn: TypeAlias = Callable[[EngineCore, int], Any]
"""Called in every turn of every replica with the number of the turn."""

_LOADING = threading.Lock()


class _Run:
    """Hold the state of one run of a layout."""

    def __init__(
        self,
        layout: Layout,
        make: Make,
        leading: type[Leads],
        arrivals: list[list[list[Submit]]],
        *,
        overlap: str,
        timeout: float,
        each_turn: EachTurn | None,
    ) -> None:
        self.layout, self.make, self.leading, self.arrivals = layout, make, leading, arrivals
        self.overlap, self.timeout = overlap, timeout
        self.each_turn = each_turn
        self.store, self.wakeups = dist.HashStore(), LocalWakeups(layout.data)
        self.total = sum(len(group) for turns in arrivals for group in turns)
        self.ended = 0
        self.lock = threading.Lock()
        self.plans: list[queue.Queue[Any]] = [queue.Queue() for _ in range(layout.ranks)]
        self.results: list[queue.Queue[StepResult]] = [queue.Queue() for _ in range(layout.data)]
        self.made: list[Replica | None] = [None] * layout.data
        self.errors: list[BaseException] = []
        #: Building a rank may change settings of the process temporarily, so no rank runs before all are
        #: built.
        self.all_made = threading.Barrier(layout.ranks)

    def rank(self, number: int) -> None:
        torch.set_num_threads(1)
        mesh = make_mesh(self.layout, number)
        expert_group = None
        replica = self.layout.replica(number)
        try:
            mesh.connect(self.store, 0, self.timeout)
            with _LOADING:
                engine, runner = self.make(mesh)
            self.all_made.wait(DEADLINE)
            if self.layout.place(number):
                return self._follow(runner, number)
            if self.layout.expert and self.layout.data > 1:
                group = AgreementGroup(replica, self.layout.data, self.wakeups.of(replica))
                group.connect(self.store, 0, self.timeout)
                expert_group = ExpertGroup(group)
            self._lead(engine, runner, replica, expert_group)
        except BaseException as error:
            with self.lock:
                self.errors.append(error)
            self.all_made.abort()
            mesh.abort()
            if expert_group is not None:
                expert_group.abort()

    def _follow(self, runner: Runner, number: int) -> None:
        while (plan := self.plans[number].get(timeout=DEADLINE)) is not None:
            handle = runner.forward(plan)
            runner.sample(handle, self.plans[number].get(timeout=DEADLINE) if plan.constrained else None)
            self.results[self.layout.replica(number)].put(runner.read(handle))
        runner.close()

    def _lead(self, engine: Any, runner: Any, replica: int, expert_group: ExpertGroup | None) -> None:
        first = replica * self.layout.tensor
        runner.__class__ = self.leading
        runner.plans_of = self.plans[first + 1 : first + self.layout.tensor]
        runner.results = self.results[replica]
        engine.overlap = OverlapPolicy(self.overlap)
        engine.expert_group = expert_group
        try:
            answers = self._serve(engine, self.arrivals[replica])
            stats = rig.check_idle(engine)
            plans = getattr(runner, "plans", [])
            self.made[replica] = Replica(answers, stats, plans, getattr(runner, "deepest", 0), runner)
        finally:
            for one in runner.plans_of:
                one.put(None)
            engine.close()

    def _serve(self, engine: Any, turns: list[list[Submit]]) -> dict[int, rig.Answer]:
        """Hands over ``turns[i]`` before turn i, and steps until every replica's requests have ended."""
        answers: dict[int, rig.Answer] = {}
        until, turn = time.monotonic() + DEADLINE, 0
        while self.ended < self.total or engine.has_work():
            assert time.monotonic() < until, "the layout hangs"
            assert not self.errors, "another rank failed"
            for one in turns[turn] if turn < len(turns) else []:
                answers[one.sequence] = rig.Answer()
                engine.submit(one)
            if self.each_turn is not None:
                self.each_turn(engine, turn)
            turn += 1
            if not engine.has_work():
                time.sleep(0.001)
                continue
            for event in engine.step():
                answers[event.sequence].take(event)
                if event.finish is not None:
                    with self.lock:
                        self.ended += 1
        return answers


def on_layout(
    layout: Layout,
    folder: Path,
    arrivals: list[list[list[Submit]]],
    *,
    overlap: str = "off",
    dispatch: str = "auto",
    mtp: int = 0,
    automata: Callable[[], Automata] | None = None,
    each_turn: EachTurn | None = None,
    **options: Any,
) -> list[Replica]:
    """``run_layout`` with engines of ``tests.e0.rig``; ``automata``: the grammars of one
    replica. ``options``: make_engine's."""

    def make(mesh: Mesh) -> tuple[Any, Any]:
        spec = rig.spec_of(folder, mtp)
        experts = ExpertOptions(dispatch=dispatch)
        model = load_model(
            str(folder), spec, torch.float64, rig.CPU, progress=False, mesh=mesh, experts=experts
        )
        assert isinstance(model, Decoder)
        grammars = None if automata is None else automata().source()
        return rig.make_engine(folder, model=model, launcher=mesh.launcher, grammars=grammars, **options)

    return run_layout(layout, make, Leading, arrivals, overlap=overlap, each_turn=each_turn)


def run_layout(
    layout: Layout,
    make: Make,
    leading: type[Leads],
    arrivals: list[list[list[Submit]]],
    *,
    overlap: str = "off",
    timeout: float = 90.0,
    each_turn: EachTurn | None = None,
) -> list[Replica]:
    """Run ``layout``. Return the results of each replica for its ``arrivals[replica][turn]``.

    ``leading`` wraps the runners of engines. Raise the first original exception of a rank.
    """
    run = _Run(
        layout,
        make,
        leading,
        arrivals,
        overlap=overlap,
        timeout=timeout,
        each_turn=each_turn,
    )
    threads = [threading.Thread(target=run.rank, args=(n,), daemon=True) for n in range(layout.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE + 60)
        assert not thread.is_alive(), "a rank hangs"
    for error in sorted(run.errors, key=lambda error: isinstance(error, CommLost | queue.Empty)):
        raise error
    return [made for made in run.made if made is not None]
