"""Steps that repeat their decode rows have the plans and events of a scheduler without the short cut."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Rig, random_run
from tests.support.slow import mostly_slow
from weft.scheduler import commit as commit_module
from weft.scheduler import scheduler as scheduler_module
from weft.scheduler.state import SchedulerState
from weft.scheduler.steady import SteadyRows
from weft.types.plan import StepPlan


def plain(value: Any) -> Any:
    """Return ``value`` with arrays as lists and with their dtypes, for comparison."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.flags.writeable, value.tolist()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, [plain(getattr(value, name)) for name in value.__struct_fields__]
    return value


def recorded(seed: int, depth: int, patch: pytest.MonkeyPatch, steady: bool) -> tuple[list[Any], int, int]:
    """Return (plans and events of a random run, plans with steady rows, commits of steady rows)."""
    made: list[Any] = []
    planned = committed = 0
    freeze, commit = scheduler_module.Scheduler.freeze, scheduler_module.Scheduler.commit
    segment, quiet = SteadyRows.segment, commit_module._commit_steady

    def frozen(self: Any, builder: Any) -> StepPlan:
        plan = freeze(self, builder)
        made.append(plain(plan))
        return plan

    def told(self: Any, *given: Any) -> Any:
        events = commit(self, *given)
        made.append(plain(events))
        return events

    def repeated(self: SteadyRows) -> Any:
        nonlocal planned
        planned += 1
        return segment(self)

    def quietly(*given: Any) -> Any:
        nonlocal committed
        events = quiet(*given)
        committed += events is not None
        return events

    with patch.context() as patched:
        patched.setattr(scheduler_module.Scheduler, "freeze", frozen)
        patched.setattr(scheduler_module.Scheduler, "commit", told)
        patched.setattr(SteadyRows, "segment", repeated)
        patched.setattr(commit_module, "_commit_steady", quietly)
        if not steady:
            patched.setattr(SchedulerState, "steady", lambda self: None)
        random_run(seed, depth, drafts=False, losses=0.02)
    return made, planned, committed


@mostly_slow(("seeds", "depth"), [(range(1), 2), (range(2, 8), 1), (range(8, 14), 2)], 1)
def test_plans_and_events_are_those_without_the_short_cut(
    seeds: range, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = committed = 0
    for seed in seeds:
        made, plans, commits = recorded(seed, depth, monkeypatch, True)
        assert made == recorded(seed, depth, monkeypatch, False)[0], f"seed {seed}"
        planned += plans
        committed += commits
    assert planned > 0
    assert committed > 0


def test_rows_are_steady_from_their_second_step_until_a_slot_changes() -> None:
    rig = Rig(kv_config(), 1)
    for number in range(3):
        rig.submit(submit(number, [1, 2, 3 + number], max_tokens=12))
    state, found = rig.scheduler._state, []
    for _ in range(8):
        rig.step()
        found.append(state.unchanged())
    assert found[0] is None
    assert found[3] is not None
    assert found[3] is found[7]
    rig.scheduler.finish(1)
    assert state.unchanged() is None
    rig.submit(submit(7, [1, 2, 9], max_tokens=12))
    rig.step()
    assert state.unchanged() is None, "a prompt is computed"
