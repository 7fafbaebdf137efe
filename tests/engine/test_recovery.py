"""A group loses ranks: the engine recomputes running sequences, and streams continue."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.e0.rig import make_engine, run, submit
from tests.overlap.test_split import decode, segment
from tests.support.automata import Automata, named, random_automaton
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.common.restarts import RestartBudget
from weft.engine.core import EngineCore
from weft.engine.grammars import GrammarSource
from weft.group.types import GroupLost
from weft.overlap.bucket_trials import Bucket, choose
from weft.overlap.overlap_policy import OverlapPolicy
from weft.runner.runner import Runner
from weft.runner.step_handle import StepHandle
from weft.types.messages import Submit
from weft.types.plan import StepPlan, StepResult, TokenMasks
from weft.types.sampling import TokenParams

DEADLINE = deadline(60.0)


class Lossy:
    """A small executor of a group: loses the other ranks whenever the test says so."""

    def __init__(self, runner: Runner, phases: list[str], every: int) -> None:
        self._runner = runner
        self._phases, self._every = phases, every
        self._calls = 0
        self.recoveries = 0
        self.broken = self.idle_loss = self.slow = False
        self.expert_group = self.wakeup = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def _maybe(self, phase: str) -> None:
        if self._phases and phase == self._phases[0]:
            self._calls += 1
            if self._calls >= self._every:
                self._calls = 0
                self._phases.pop(0)
                raise GroupLost(1, f"planted while it was in {phase}")

    def forward(self, plan: StepPlan) -> StepHandle:
        self._maybe("forward")
        return self._runner.forward(plan)

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        self._runner.sample(handle, masks)
        self._maybe("sample")

    def read(self, handle: StepHandle) -> StepResult:
        self._maybe("before read")
        result = self._runner.read(handle)
        self._maybe("read")
        return result

    def check(self) -> None:
        if self.idle_loss:
            self.idle_loss = False
            raise GroupLost(None, "planted while idle")

    def recover(self, lost: GroupLost) -> None:
        self._began = time.monotonic()

    def recovered(self, wait: float) -> bool:
        time.sleep(wait)
        if self.broken:
            raise EngineDead("planted: no rank comes back")
        if self.slow or time.monotonic() - self._began < 0.1:
            return False
        self._runner.reset()
        self.recoveries += 1
        return True

    def close(self, leave: bool = False) -> None:
        self._runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("recovery"), "llama")


def lossy(
    folder: Path, depth: int, phases: list[str], every: int = 5, **more: object
) -> tuple[EngineCore, Lossy]:
    engine, runner = make_engine(folder, depth=depth, chunk=7, max_num_seqs=4, **more)  # type: ignore[arg-type]
    wrapped = Lossy(runner, phases, every)
    engine.runner = wrapped  # type: ignore[assignment]
    return engine, wrapped


def run_for_ever(engine: EngineCore) -> None:
    while engine.has_work():
        engine.step()


def asked(seed: int) -> list[list[Submit]]:
    rng = random.Random(seed)
    made: list[list[Submit]] = []
    for number in range(10):
        ids = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(2, 30))]
        params = TokenParams(
            temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randrange(8, 30), logprobs=rng.choice([-1, 2])
        )
        made.append([submit(number + 1, ids, params, request=number)])
    return made


@pytest.mark.requirement("A7")
@mostly_slow("depth", [1, 2], [2])
def test_tokens_are_equal_whatever_is_lost_when(folder: Path, depth: int) -> None:
    undisturbed, _ = make_engine(folder, depth=depth, chunk=7, max_num_seqs=4)
    wanted = run(undisturbed, asked(depth))
    undisturbed.close()
    phases = ["forward", "sample", "before read", "read", "forward"]
    engine, executor = lossy(folder, depth, phases, every=9)
    answers = run(engine, asked(depth))
    assert not phases
    assert executor.recoveries == engine.stats().recoveries == 5
    assert engine.stats().requeued > 0
    assert {n: (a.tokens, a.ends) for n, a in answers.items()} == {
        n: (a.tokens, a.ends) for n, a in wanted.items()
    }
    stats = engine.stats()
    assert stats.free_blocks == tuple(pool.num_blocks for pool in engine.runner.kv.pools)
    assert stats.free_slots == engine.runner.kv.num_slots
    engine.close()


def test_a_loss_ends_the_trials_of_micro_batches(folder: Path) -> None:
    """The step that was lost may have been the first one in micro-batches."""
    phases = ["before read"]
    engine, _ = lossy(folder, 1, phases, every=9)
    bucket = Bucket(4, 1, 2048)
    engine.overlap = OverlapPolicy("measured", lambda plan: bucket if plan.step < 9 else None)
    engine.overlap.wants(StepPlan(step=1, decode=segment([decode(0), decode(1)])))
    engine.overlap._trials[bucket].choice = choose([2.0], [1.0])
    assert engine.stats().overlap_choices
    run(engine, asked(3)[:1])
    assert not phases
    assert engine.stats().recoveries == 1
    assert not engine.stats().overlap_choices
    engine.close()


@mostly_slow("depth", [1, 2], [2])
def test_tokens_committed_before_the_loss_are_reported(folder: Path, depth: int) -> None:
    """A constrained step samples after the commit of the step before."""
    ends = (5,)
    made = [random_automaton(random.Random(number), VOCAB, ends) for number in range(10)]

    def asked_with_grammars() -> list[list[Submit]]:
        plain = [one for (one,) in asked(depth)]
        return [[replace(one, grammar=named(number))] for number, one in enumerate(plain)]

    def source() -> GrammarSource:
        return Automata(made, ends).source()

    undisturbed, _ = make_engine(folder, depth=depth, chunk=7, max_num_seqs=4, grammars=source())
    wanted = run(undisturbed, asked_with_grammars())
    undisturbed.close()
    engine, executor = lossy(folder, depth, ["sample"] * 4, every=7, grammars=source())
    answers = run(engine, asked_with_grammars())
    assert executor.recoveries == 4
    assert engine.stats().constrained_steps > 0
    assert {n: (a.tokens, a.ends) for n, a in answers.items()} == {
        n: (a.tokens, a.ends) for n, a in wanted.items()
    }
    engine.close()


def test_a_rank_lost_while_idle_is_back_before_anyone_asks(folder: Path) -> None:
    engine, executor = lossy(folder, 1, [])
    assert not engine.has_work()
    executor.idle_loss = True
    engine.check()
    assert engine.recovering
    assert engine.has_work()
    until = time.monotonic() + DEADLINE
    while engine.has_work() and time.monotonic() < until:
        assert engine.step() == []
    assert executor.recoveries == 1
    answers = run(engine, asked(3)[:1])
    assert answers[1].ends
    engine.close()


def test_requests_that_come_and_go_meanwhile(folder: Path) -> None:
    engine, _ = lossy(folder, 2, ["forward"], every=3)
    requests = [one for (one,) in asked(4)]
    for one in requests[:3]:
        engine.submit(one)  # type: ignore[arg-type]
    while not engine.recovering:
        engine.step()
    ended = [event.sequence for event in engine.finish(1)]
    for one in requests[3:]:
        engine.submit(one)  # type: ignore[arg-type]
    while engine.has_work():
        ended += [event.sequence for event in engine.step() if event.finish is not None]
    assert sorted(ended) == list(range(1, 11))
    engine.close()


def test_a_request_that_ends_every_group_is_given_up(folder: Path) -> None:
    """Only the request fails; the engine continues."""
    engine, executor = lossy(folder, 1, ["forward"] * 3, every=2)
    params = TokenParams(temperature=0.0, max_tokens=4)
    answers = run(engine, [[submit(1, list(range(1, 30)), params, request=1)]])
    assert executor.recoveries == 3
    assert answers[1].ends == ["error"]
    assert answers[1].error.code == "engine_dead"
    assert run(engine, [[submit(2, [1, 2, 3], params, request=2)]])[2].ends == ["length"]
    engine.close()


def test_a_group_that_does_not_come_back_ends_the_engine(folder: Path) -> None:
    engine, executor = lossy(folder, 1, ["forward"], every=1)
    executor.broken = True
    engine.submit(asked(5)[0][0])  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="no rank comes back"):
        run_for_ever(engine)
    engine.close()


def test_an_engine_can_be_closed_while_its_group_is_formed(folder: Path) -> None:
    engine, executor = lossy(folder, 1, ["forward"], every=1)
    executor.slow = True
    engine.submit(asked(7)[0][0])  # type: ignore[arg-type]
    engine.step()
    assert engine.recovering
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < DEADLINE / 2


def test_one_rank_alone_has_nobody_to_lose(folder: Path) -> None:
    engine, _ = make_engine(folder)
    engine.check()
    with pytest.raises(GroupLost, match="no rank"):
        engine.runner.recover(GroupLost(None, "no rank"))
    engine.close()


def test_a_budget_of_restarts() -> None:
    budget = RestartBudget(2, 10.0)
    assert [budget.grant(t) for t in (0.0, 1.0, 2.0, 9.9, 10.0, 10.5, 11.0)] == [
        True,
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert budget.granted == 4
    assert not RestartBudget(0, 10.0).grant(0.0)
