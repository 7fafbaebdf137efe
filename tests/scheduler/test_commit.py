"""Commits of hand-made plans: rows with drafts, and results that contradict the plan."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.scheduler.fake_runner import ROW_ERROR, kv_config, submit
from tests.scheduler.harness import Rig
from weft.common.errors import EngineDead
from weft.scheduler.commit import commit
from weft.scheduler.plan_builder import DecodeRows, PlanBuilder
from weft.scheduler.sequence import Running
from weft.types.messages import TokenEvent
from weft.types.plan import EMPTY, StepPlan, StepResult, column


def verify_step(rig: Rig, drafts: int) -> tuple[StepPlan, int]:
    """Put a verify row with ``drafts`` drafts of sequence 0 in flight. Return the plan and the slot."""
    state = rig.scheduler._state
    sequence = state.live[0]
    run = sequence.state
    assert isinstance(run, Running)
    count = 1 + drafts
    builder = PlanBuilder(state.last_commit + 1, 16, state.columns)
    builder.grow(state.caches.reserve(run.slot, int(state.columns.num_scheduled[run.slot]) + count))
    builder.add_decode(DecodeRows(np.array([run.slot]), np.array([count]), np.array([0])))
    plan = builder.close().freeze([])
    state.launched(plan)
    return plan, run.slot


def result(plan: StepPlan, tokens: list[int], accepted: int) -> StepResult:
    return StepResult(
        step=plan.step,
        rows=column([0]),
        offsets=column([0, len(tokens)]),
        tokens=column(tokens),
        accepted=column([accepted]),
    )


def started(**params: object) -> Rig:
    rig = Rig(kv_config(), 1)
    rig.submit(submit(0, [1, 2, 3], **{"max_tokens": 9, **params}))
    rig.step()
    return rig


@pytest.mark.parametrize(("accepted", "output"), [(0, [7]), (1, [7, 8]), (2, [7, 8, 9])])
def test_accepted_drafts_and_one_more_are_appended(accepted: int, output: list[int]) -> None:
    rig = started()
    plan, slot = verify_step(rig, 2)
    columns = rig.scheduler._state.columns
    assert (columns.num_computed[slot], columns.num_scheduled[slot]) == (3, 6)
    (event,) = commit(rig.scheduler._state, plan, result(plan, [7, 8, 9], accepted))
    assert event == TokenEvent(sequence=0, token_ids=tuple(output), accepted=accepted, rejected=2 - accepted)
    assert columns.num_computed[slot] == columns.num_scheduled[slot] == 4 + accepted
    assert len(rig.scheduler._state.live[0].tokens) == columns.num_computed[slot] + 1


def test_an_end_among_the_drafts_cuts_what_follows() -> None:
    rig = started(stop_ids=(8,), min_tokens=2)
    plan, _ = verify_step(rig, 2)
    (event,) = commit(rig.scheduler._state, plan, result(plan, [7, 8, 9], 2))
    assert (event.token_ids, event.finish, event.stop_id) == ((7, 8), "stop", 8)
    assert (event.accepted, event.rejected) == (2, 0)
    rig.check_idle()


def test_drafts_behind_an_end_are_not_accepted() -> None:
    """The drafts were correct, but lie behind a stop id, so the sequence does not get the tokens."""
    rig = started(stop_ids=(7,))
    plan, _ = verify_step(rig, 2)
    (event,) = commit(rig.scheduler._state, plan, result(plan, [7, 8, 9], 2))
    assert (event.token_ids, event.finish) == ((7,), "stop")
    assert (event.accepted, event.rejected) == (1, 1)


def test_an_error_behind_accepted_drafts_ends_the_sequence_after_them() -> None:
    rig = started(logprobs=-1)
    plan, _ = verify_step(rig, 2)
    wrong = msgspec.structs.replace(result(plan, [7, 0, 9], 1), row_error=((0, ROW_ERROR),))
    (event,) = commit(rig.scheduler._state, plan, wrong)
    assert (event.token_ids, event.finish, event.error) == ((7,), "error", ROW_ERROR)
    assert rig.scheduler.stats().row_errors == 1
    rig.check_idle()


def test_an_end_before_an_error_is_the_end() -> None:
    rig = started(stop_ids=(7,))
    plan, _ = verify_step(rig, 2)
    wrong = msgspec.structs.replace(result(plan, [7, 0, 9], 1), row_error=((0, ROW_ERROR),))
    (event,) = commit(rig.scheduler._state, plan, wrong)
    assert (event.token_ids, event.finish, event.error) == ((7,), "stop", None)
    assert rig.scheduler.stats().row_errors == 0


def test_results_that_do_not_fit_their_plan() -> None:
    rig = started(logprobs=1)
    state = rig.scheduler._state
    plan, _ = verify_step(rig, 0)
    good = result(plan, [7], 0)
    with pytest.raises(EngineDead, match="order"):
        commit(state, plan, msgspec.structs.replace(good, step=plan.step + 1))
    with pytest.raises(EngineDead, match="other rows"):
        commit(state, plan, msgspec.structs.replace(good, rows=EMPTY))
    with pytest.raises(EngineDead, match="logprobs"):
        commit(state, plan, good)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_states_after_rejected_drafts_are_no_states(accepted: int) -> None:
    rig = Rig(kv_config(states=4, copies=3), 1)
    rig.submit(submit(0, [1, 2, 3], max_tokens=9))
    rig.step()
    plan, slot = verify_step(rig, 2)
    exact = rig.scheduler._state.columns.exact
    assert exact[slot] == 3
    commit(rig.scheduler._state, plan, result(plan, [7, 8, 9], accepted))
    assert exact[slot] == 1 + accepted


def test_states_of_a_later_row_are_left_alone() -> None:
    rig = Rig(kv_config(states=4, copies=3), 1)
    rig.submit(submit(0, [1, 2, 3], max_tokens=12))
    rig.step()
    first, slot = verify_step(rig, 2)
    columns = rig.scheduler._state.columns
    later = msgspec.structs.replace(first, step=first.step + 1)
    rig.scheduler._state.launched(later)
    commit(rig.scheduler._state, first, result(first, [7, 8, 9], 0))
    assert (columns.num_scheduled[slot], columns.exact[slot]) == (7, 3)
