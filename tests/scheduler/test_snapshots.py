"""Recurrent models in the scheduler: when states are saved and loaded, and which computation is saved."""

from __future__ import annotations

import pytest

from tests.scheduler.fake_runner import BAD_SEED, alone, kv_config, submit
from tests.scheduler.harness import Rig
from weft.types.plan import LoadState, SaveState, StepPlan

PROMPT = [(7 * n) % 50 for n in range(30)]


def rig(depth: int = 1, **facts: object) -> Rig:
    section = {key: facts.pop(key) for key in ("max_num_batched_tokens", "max_num_seqs") if key in facts}
    return Rig(kv_config(**{"states": 8, "blocks": 60, **facts}), depth, **section)  # type: ignore[arg-type]


def saves(plans: list[StepPlan]) -> list[tuple[int, int]]:
    """Return (step, slot) of each snapshot of the first state group."""
    return [
        (plan.step, op.slot)
        for plan in plans
        for op in plan.ops
        if isinstance(op, SaveState) and op.kind == 1
    ]


def loads(plans: list[StepPlan]) -> int:
    return sum(isinstance(op, LoadState) and op.kind == 1 for plan in plans for op in plan.ops)


def chunks(plans: list[StepPlan]) -> list[tuple[int, int]]:
    """Return (start, end) of each prefill row."""
    return [
        (start, start + count)
        for plan in plans
        for start, count in zip(plan.prefill.start.tolist(), plan.prefill.count.tolist(), strict=True)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_repeated_prompt_goes_on_from_the_last_boundary(depth: int) -> None:
    it = rig(depth, stride=28)
    it.submit(submit(0, PROMPT))
    it.drain()
    assert chunks(it.plans) == [(0, 24), (24, 28), (28, 30)]  # budget, mark, end
    assert saves(it.plans) == [(2, 0)]  # in the plan after the chunk
    for number in (1, 2):
        it.submit(submit(number, PROMPT + [1] * number))
        it.drain()
        assert it.outputs[number].num_cached == 28
    assert loads(it.plans) == 2
    it.check_outputs()
    it.check_idle()


def test_the_next_turn_of_a_chat_goes_on_from_what_was_said() -> None:
    it = rig(stride=16)
    it.submit(submit(0, PROMPT[:10], max_tokens=17))
    it.drain()
    said = PROMPT[:10] + it.outputs[0].tokens
    assert len(said) == 27
    it.submit(submit(1, [*said, 3, 4, 5]))
    it.drain()
    # The last id was sampled and never computed: 26 positions, with the last boundary at 24. In decode,
    # snapshots are as far apart as the stride (at most 64).
    assert it.outputs[1].num_cached == 16
    other = rig(stride=4)
    other.submit(submit(0, PROMPT[:10], max_tokens=17))
    other.drain()
    other.submit(submit(1, [*said, 3, 4, 5]))
    other.drain()
    assert other.outputs[1].num_cached == 24
    assert len(saves(other.plans)) == 1 + 4 + 2  # 8; 12, 16, 20, 24; then 28 and 32


def test_a_decoding_sequence_keeps_one_snapshot() -> None:
    it = rig(stride=4)
    it.submit(submit(0, PROMPT[:9], max_tokens=30))
    it.drain()
    assert len(saves(it.plans)) == 8
    kind = it.scheduler._state.caches.kinds[1]
    assert len(kind.pool._index) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("copies", [2, 4])
def test_drafts_do_not_keep_boundaries_from_being_saved(copies: int) -> None:
    """With one step in flight the length is known at planning, and earlier states are still available."""
    it = rig(stride=4, copies=copies)
    for number in range(6):
        it.submit(submit(number, PROMPT[number : number + 9], max_tokens=30))
    it.drain()
    it.check_outputs()
    assert it.runner.accepted > 20
    backs = [op.back for plan in it.plans for op in plan.ops if isinstance(op, SaveState)]
    assert max(backs) > 0
    assert len(saves(it.plans)) >= 6 * 7


def test_a_slot_whose_length_is_not_known_is_not_saved() -> None:
    it = rig(2, stride=4, copies=4)
    for number in range(4):
        it.submit(submit(number, PROMPT[number : number + 9], max_tokens=30))
    it.drain()  # the runner would fail
    it.check_outputs()
    assert it.runner.accepted > 10


def test_a_shared_start_is_hit_from_the_third_prompt_on() -> None:
    """The second prompt reveals the shared length: the entries were cached, but no state was."""
    it = rig(stride=16)
    cached = []
    for number in range(4):
        it.submit(submit(number, PROMPT[:18] + [number] * 10))
        it.drain()
        cached.append(it.outputs[number].num_cached)
    assert cached == [0, 0, 16, 16]
    assert (0, 16) in chunks(it.plans)
    it.check_outputs()


def test_long_prompts_leave_snapshots_on_the_way() -> None:
    it = rig(stride=8, max_num_batched_tokens=11)
    it.submit(submit(0, PROMPT))
    it.drain()
    assert chunks(it.plans) == [(0, 8), (8, 16), (16, 24), (24, 28), (28, 30)]
    it.submit(submit(1, [*PROMPT[:20], 3, 3, 3]))
    it.drain()
    assert it.outputs[1].num_cached == 16
    it.check_outputs()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_parallel_samples_go_on_from_their_leaders_state(depth: int, caching: bool) -> None:
    it = rig(depth, caching=caching)
    for choice in range(3):
        it.submit(submit(choice, PROMPT, request=9, choice=choice))
    it.drain()
    it.check_outputs()
    assert [it.outputs[number].num_cached for number in range(3)] == [0, 28, 28]
    it.submit(submit(3, PROMPT))
    it.drain()
    assert it.outputs[3].num_cached == (28 if caching else 0)


def test_without_sharing_no_chunk_is_cut_and_nothing_saved() -> None:
    it = rig(caching=False)
    it.submit(submit(0, PROMPT))
    it.drain()
    assert chunks(it.plans) == [(0, 24), (24, 30)]
    assert not saves(it.plans)


def test_a_full_pool_never_keeps_anyone_waiting() -> None:
    it = rig(2, states=1, stride=4, blocks=80)
    for number in range(8):
        it.submit(submit(number, PROMPT[number : number + 12], max_tokens=20))
    it.drain()
    it.check_outputs()
    it.check_idle()
    assert it.scheduler.stats().preemptions == 0


def test_a_slot_is_not_given_away_while_its_state_is_saved() -> None:
    """The sequence sits out the plan that saves the state, and is aborted. The slot waits for this plan."""
    it = rig(2, stride=4, slots=4, max_num_seqs=2)
    it.submit(submit(0, PROMPT[:8], max_tokens=5))  # at a boundary with 8 tokens, at the limit with 12
    it.submit(submit(1, PROMPT[:5], max_tokens=30))
    for _ in range(40):
        plan = it.plan() if len(it.in_flight) < 2 else None
        if plan is not None and (plan.step, 0) in saves([plan]) and 0 not in plan.decode.slot.tolist():
            break
        if len(it.in_flight) == 2:
            it.commit()
    else:
        raise AssertionError("no such plan came")
    it.finish(0)
    assert it.scheduler._state.slots.available() == 2
    it.commit()
    assert it.scheduler._state.slots.available() == 2
    it.commit()
    assert it.scheduler._state.slots.available() == 3
    it.drain()
    it.check_outputs()


def test_a_snapshot_that_its_plan_had_not_committed_outlives_an_abort() -> None:
    it = rig(2, stride=28, full=False)  # entries that had not committed are lost
    it.submit(submit(0, PROMPT))
    while not saves(it.plans):
        assert len(it.plans) < 9
        if len(it.in_flight) == 2:
            it.commit()
        it.plan()
    it.finish(0)
    it.drain()
    it.submit(submit(1, PROMPT))
    it.drain()
    assert it.outputs[1].num_cached == 28


def test_a_row_that_failed_leaves_no_snapshot() -> None:
    """The third output makes 8 positions. At the error, the plan that saves the state is in flight."""
    tokens, finish = alone(submit(0, PROMPT[:6], seed=BAD_SEED), 48)
    assert (len(tokens), finish) == (2, "error")
    it = rig(2, stride=4)
    it.submit(submit(0, PROMPT[:6], seed=BAD_SEED))
    it.drain()
    assert len(saves(it.plans)) == 2
    kind = it.scheduler._state.caches.kinds[1]
    assert len(kind.pool._index) == 1  # type: ignore[attr-defined]
    it.check_idle()


def test_a_preempted_sequence_comes_back_to_its_last_boundary() -> None:
    it = rig(blocks=20, stride=4, max_num_seqs=2)
    it.submit(submit(0, PROMPT[:12], max_tokens=36))
    it.submit(submit(1, PROMPT[3:15], max_tokens=36))
    it.drain()
    it.check_outputs()
    assert it.scheduler.stats().preemptions > 0
    assert loads(it.plans) > 0


def test_tokens_accepted_as_drafts_are_cached() -> None:
    """Several tokens in one step fill blocks. Boundaries lie between these tokens."""
    for states in (0, 40):
        it = rig(stride=4, copies=4, states=states)
        it.runner.right = 1.0
        for number in range(5):
            it.submit(submit(number, PROMPT[: 8 + number], max_tokens=30 - number))
        it.drain()
        for number in range(5):
            said = PROMPT[: 8 + number] + it.outputs[number].tokens
            it.submit(submit(10 + number, [*said, 3]))
            it.drain()
            # 37 positions were computed. No plan follows the last step, so states at its end are not saved.
            assert it.outputs[10 + number].num_cached >= (32 if states else 36)
        it.check_outputs()
