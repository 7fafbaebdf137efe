"""Steps that repeat their decode rows have the plans and events of a scheduler without the short cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Rig, random_run
from tests.scheduler.tier_rig import TierRig
from tests.support.slow import mostly_slow
from weft.scheduler import commit as commit_module
from weft.scheduler import scheduler as scheduler_module
from weft.scheduler.plan_builder import DecodeRows
from weft.scheduler.reserve import Reserver
from weft.scheduler.sequence import Running
from weft.scheduler.state import SchedulerState
from weft.scheduler.steady import SteadyRows
from weft.types.grammar import Text
from weft.types.plan import EMPTY, StepPlan, StepResult


def plain(value: Any) -> Any:
    """Return ``value`` with arrays as lists and with their dtypes, for comparison."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.flags.writeable, value.tolist()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, [plain(getattr(value, name)) for name in value.__struct_fields__]
    return value


def fresh(rows: SteadyRows, state: SchedulerState) -> None:
    """Check that ``rows`` have the columns that would be made now. INVARIANT: no column of steady rows is
    stale when used."""
    columns, slots = state.columns, rows.slots
    running = [s.state.slot for s in state.running if isinstance(s.state, Running)]
    assert slots.tolist() == running == rows._slot.tolist()
    assert rows._gen.tolist() == columns.gen[slots].tolist()
    assert [s.id for s in rows.sequences] == columns.sequence[slots].tolist()
    assert rows.sequences == state.in_slot[slots].tolist()
    assert rows.named == list(zip(columns.sequence[slots], columns.num_cached[slots], strict=True))
    limit = columns.limit[slots]
    assert limit.tolist() == [s.limit for s in rows.sequences]
    assert rows.left == (limit - 1 - rows._start).min() == rows._limit_start - rows._start[0] + 1
    assert rows._quiet == bool(columns.quiet[slots].all())
    assert rows._reserved.tolist() == columns.reserved[slots].tolist()
    assert rows._covered == (rows._reserved - rows._start).min()
    stops = set() if rows._stops is None else {*rows._stops.ravel().tolist()}
    assert stops - {-1} == {*columns.stops[slots].ravel().tolist()} - {-1}


def recorded(
    run: Callable[[], object], patch: pytest.MonkeyPatch, steady: bool
) -> tuple[list[Any], int, int]:
    """Return (plans and events of a run, plans with steady rows, commits of steady rows)."""
    made: list[Any] = []
    planned = committed = 0
    freeze, commit = scheduler_module.Scheduler.freeze, scheduler_module.Scheduler.commit
    segment, quiet = SteadyRows.segment, commit_module._commit_steady

    def frozen(self: Any, builder: Any) -> StepPlan:
        plan = freeze(self, builder)
        made.append(plain(plan))
        return plan

    def output(self: Any, *given: Any) -> Any:
        events = commit(self, *given)
        made.append(plain(events))
        return events

    def repeated(self: SteadyRows) -> Any:
        nonlocal planned
        planned += 1
        made = segment(self)
        assert made.start.tolist() == self._columns.num_scheduled[self.slots].tolist()
        return made

    def quietly(state: SchedulerState, plan: StepPlan, result: StepResult) -> Any:
        nonlocal committed
        rows = state.unchanged()
        if rows is not None:
            fresh(rows, state)
        events = quiet(state, plan, result)
        if events is not None:
            committed += 1
            assert rows is not None
            assert not plan.constrained
            assert all(s.params.logprobs < 0 and s.constraint is None for s in rows.sequences)
            assert plan.decode.gen.tolist() == state.columns.gen[rows.slots].tolist()
        return events

    with patch.context() as patched:
        patched.setattr(scheduler_module.Scheduler, "freeze", frozen)
        patched.setattr(scheduler_module.Scheduler, "commit", output)
        patched.setattr(SteadyRows, "segment", repeated)
        patched.setattr(commit_module, "_commit_steady", quietly)
        if not steady:
            patched.setattr(SchedulerState, "steady", lambda self: None)
        run()
    return made, planned, committed


@mostly_slow(("seeds", "depth"), [(range(1), 2), (range(2, 8), 1), (range(8, 14), 2)], 1)
def test_plans_and_events_are_those_without_the_short_cut(
    seeds: range, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = committed = 0
    for seed in seeds:
        run = partial(random_run, seed, depth, drafts=False, losses=0.02)
        made, plans, commits = recorded(run, monkeypatch, True)
        assert made == recorded(run, monkeypatch, False)[0], f"seed {seed}"
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


def test_a_result_without_rows_is_not_plain() -> None:
    """Also before the first result: the caller must see a wrong result."""
    rig = Rig(kv_config(), 1)
    for number in range(3):
        rig.submit(submit(number, [1, 2, 3 + number], max_tokens=12))
    while rig.plan() is not None and (rows := rig.scheduler._state.unchanged()) is None:
        rig.commit()
    assert rows is not None
    plan, result = rig.in_flight[-1]
    assert not rows.plain(plan, msgspec.structs.replace(result, rows=EMPTY))
    assert rows.plain(plan, result)
    assert not rows.plain(plan, msgspec.structs.replace(result, rows=result.rows[:2]))


def landed(rig: Rig) -> None:
    """Commit all steps in flight, as before a change of the weights."""
    while rig.in_flight:
        rig.commit()


def finished(rig: Rig) -> None:
    rig.finish(1)


def another_generation(rig: Rig) -> None:
    """A new sequence takes the slot of another, which a step in flight names."""
    rig.finish(1)
    rig.submit(submit(7, [3, 1], max_tokens=9))


def preempted(rig: Rig) -> None:
    state = rig.scheduler._state
    sequence = state.live[1]
    assert isinstance(sequence.state, Running)
    landed(rig)
    state.preempt(sequence, sequence.state)


def asks_logprobs(rig: Rig) -> None:
    rig.submit(submit(7, [3, 1], max_tokens=9, logprobs=2))


def constrained(rig: Rig) -> None:
    rig.submit(submit(7, [3, 1], max_tokens=9, grammar=Text("anything")))


def other_weights(rig: Rig) -> None:
    landed(rig)
    rig.scheduler.use_weights(b"1")
    rig.submit(submit(7, [1, 2, 3], max_tokens=9))


def paused(rig: Rig) -> None:
    """No step runs for a while, then a sequence ends before the next."""
    landed(rig)
    rig.now += 5.0
    rig.collect(rig.scheduler.expire(rig.now))
    rig.finish(0)


def lost(rig: Rig) -> None:
    rig.lose()


def prefixes_forgotten(rig: Rig) -> None:
    rig.scheduler.forget_prefixes()


CHANGES = [
    finished,
    another_generation,
    preempted,
    asks_logprobs,
    constrained,
    other_weights,
    paused,
    lost,
    prefixes_forgotten,
]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_lets_steady_rows_use_old_columns(
    change: Callable[[Rig], None], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are steady before the change. Then plans, events and tokens are those without the short cut."""
    was_steady = list[bool]()

    def run() -> None:
        rig = Rig(kv_config(slots=4), depth, max_num_seqs=4)
        for number in range(3):
            rig.submit(submit(number, [1, 2, 3 + number], max_tokens=24, stop_ids=(11,) if number else ()))
        for _ in range(6):
            rig.step()
        was_steady.append(rig.scheduler._state.unchanged() is not None)
        change(rig)
        rig.drain()
        rig.check_outputs()
        rig.check_idle()
        rig.audit()

    made, plans, commits = recorded(run, monkeypatch, True)
    assert was_steady == [True]
    assert plans > 3
    assert commits > 3
    assert made == recorded(run, monkeypatch, False)[0]


@pytest.mark.parametrize("extra", [{"logprobs": 0}, {"grammar": Text("anything")}])
def test_rows_that_need_more_than_a_token_never_commit_together(
    extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        rig = Rig(kv_config(), 2)
        rig.submit(submit(0, [1, 2, 3], max_tokens=12))
        rig.submit(submit(1, [1, 2, 4], max_tokens=12, **extra))
        rig.drain()
        rig.check_outputs()

    made, plans, commits = recorded(run, monkeypatch, True)
    assert plans > 3, "the columns of the plan are reused"
    assert commits == 0
    assert made == recorded(run, monkeypatch, False)[0]


def test_a_sequence_that_comes_back_from_a_load_has_new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted sequences load their blocks and run again, beside steady rows."""

    def run() -> None:
        rig = TierRig(kv_config(blocks=16), mode="reused")
        for number, first in enumerate(([7, 3] * 8, [5, 2] * 8)):
            rig.submit(submit(number, first, max_tokens=28))
        rig.settle()
        rig.check_outputs()
        assert rig.scheduler.stats().preemptions

    made, plans, commits = recorded(run, monkeypatch, True)
    assert min(plans, commits) > 3
    assert made == recorded(run, monkeypatch, False)[0]


def test_a_step_with_fewer_rows_ends_steady_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without blocks is left out, and all sequences go on running in the same slots."""
    grow, calls = Reserver.grow, list[int]()

    def short(self: Reserver, rows: DecodeRows, *given: Any) -> DecodeRows:
        made = grow(self, rows, *given)
        calls.append(1)
        return made.where(np.arange(len(made.slots)) > 0) if len(calls) % 3 == 2 else made

    monkeypatch.setattr(Reserver, "grow", short)

    def run() -> None:
        calls.clear()
        rig = Rig(kv_config(), 1)
        for number in range(3):
            rig.submit(submit(number, [1, 2, 3 + number], max_tokens=24))
        rig.drain()
        rig.check_outputs()
        rig.check_idle()
        assert len(calls) > 2

    made, plans, commits = recorded(run, monkeypatch, True)
    assert min(plans, commits) > 3
    assert made == recorded(run, monkeypatch, False)[0]
