"""The engine measures a step from its start, or from the end of the step before, to its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e0.rig import make_engine, run, submit
from tests.support.checkpoints import make_checkpoint
from weft.common.clock import VirtualClock
from weft.runner.step_handle import StepHandle
from weft.scheduler.policy.chunk import FLOOR_TOKENS, ChunkPolicy
from weft.scheduler.policy.step_cost import PRIOR
from weft.types.plan import StepPlan, StepResult
from weft.types.sampling import TokenParams


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_flight_are_not_counted_twice(
    tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step takes the device two seconds; between two requests nothing happens for a hundred."""
    engine, runner = make_engine(make_checkpoint(tmp_path, "llama"), depth=depth)
    clock, free_at = VirtualClock(), 0.0
    monkeypatch.setattr(engine, "_clock", clock)
    complete: dict[int, float] = {}
    seen: list[float] = []
    forward, read = runner.forward, runner.read

    def timed_forward(plan: StepPlan) -> StepHandle:
        nonlocal free_at
        free_at = complete[plan.step] = max(free_at, clock.now()) + 2.0
        return forward(plan)

    def timed_read(handle: StepHandle) -> StepResult:
        clock.advance_to(complete[handle.plan.step])
        return read(handle)

    monkeypatch.setattr(runner, "forward", timed_forward)
    monkeypatch.setattr(runner, "read", timed_read)
    monkeypatch.setattr(engine.scheduler, "observe", lambda plan, seconds, cold: seen.append(seconds))
    for number in (1, 2):
        engine.submit(submit(number, [3, 4, 5], TokenParams(temperature=0.0, max_tokens=6), request=number))
        while engine.has_work():
            engine.step()
        clock.advance_to(clock.now() + 100.0)
    engine.close()
    assert len(seen) == engine.stats().steps == 12
    assert seen == [2.0] * 12


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_feeds_the_chunk_policy(tmp_path: Path, depth: int) -> None:
    """A target of a microsecond: every chunk beside a decode row is the floor, and tokens are the same."""
    made = []
    for target in (None, 1e-6):
        engine, runner = make_engine(make_checkpoint(tmp_path, "llama"), depth=depth)
        assert engine.scheduler.planner.chunks is None  # without a target nothing is measured
        if target is not None:
            engine.scheduler.planner.chunks = ChunkPolicy(target)
        greedy = TokenParams(temperature=0.0, max_tokens=30)
        first = [submit(1, [3, 4, 5], greedy, request=1)]
        rest = [submit(n, [n + i for i in range(50)], greedy, request=n) for n in range(2, 5)]
        answers = run(engine, [first, [], [], rest])
        made.append({number: answer.tokens for number, answer in answers.items()})
        engine.close()
    assert made[0] == made[1]
    chunks = engine.scheduler.planner.chunks
    assert chunks is not None
    assert chunks.cost != PRIOR
    assert runner.deepest == depth
    assert engine.stats().mixed_steps >= 3 * 50 // FLOOR_TOKENS
