"""The content of a step: segments, budget, order, chunks, policies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Rig
from weft.common.errors import EngineDead
from weft.types.plan import AllocSlot, FreeSlot, StepPlan


def sequences(rig: Rig, plan: StepPlan) -> tuple[list[int], list[int]]:
    """Return the ids of the sequences of the prefill rows and of the decode rows."""
    by_slot = {s.state.slot: s.id for s in rig.scheduler._state.running}  # type: ignore[union-attr]
    return [by_slot[s] for s in plan.prefill.slot.tolist()], [by_slot[s] for s in plan.decode.slot.tolist()]


def planned(rig: Rig) -> StepPlan:
    plan = rig.plan()
    assert plan is not None
    return plan


def same(a: StepPlan, b: StepPlan) -> bool:
    rows = all(
        np.array_equal(getattr(getattr(a, part), name), getattr(getattr(b, part), name))
        for part in ("prefill", "decode")
        for name in ("slot", "gen", "start", "count", "logits", "sample", "next_k")
    )
    return rows and [repr(op) for op in a.ops] == [repr(op) for op in b.ops]


@pytest.mark.requirement("B1", "B2")
def test_decode_is_reserved_first_and_prefill_spends_the_rest() -> None:
    rig = Rig(kv_config(), 1)
    for number in range(3):
        rig.submit(submit(number, [number] * 4, max_tokens=20))
    rig.step()
    rig.submit(submit(3, list(range(40)), max_tokens=4))
    rig.submit(submit(4, list(range(40)), max_tokens=4, salt="other"))
    plan = planned(rig)
    assert sequences(rig, plan) == ([3], [0, 1, 2])
    assert plan.prefill.count.tolist() == [21]
    assert plan.prefill.sample.tolist() == [0]
    assert plan.prefill.logits.tolist() == [0]
    rig.commit()
    plan = planned(rig)
    assert sequences(rig, plan) == ([3, 4], [0, 1, 2])  # arrival order survives a partial prompt
    assert plan.prefill.start.tolist() == [21, 0]
    assert plan.prefill.count.tolist() == [19, 2]
    assert plan.prefill.sample.tolist() == [1, 0]  # the last chunk samples in the same step
    rig.commit()
    assert len(rig.outputs[3].tokens) == 1
    rig.drain()
    rig.check_outputs()


@pytest.mark.requirement("B4")
def test_last_chunk_and_first_decode_at_depth_2() -> None:
    """A decode row is planned before the token is sampled, and starts at the future position of the token."""
    rig = Rig(kv_config(), 2)
    rig.submit(submit(0, [3] * 5, max_tokens=3))
    first, second = planned(rig), planned(rig)
    assert first.prefill.sample.tolist() == [1]
    assert second.decode.start.tolist() == [5]
    with pytest.raises(EngineDead, match="in flight"):
        rig.scheduler.plan(0.0)
    rig.commit()
    third = planned(rig)
    assert third.decode.start.tolist() == [6]
    rig.commit()
    assert rig.plan() is None  # may have reached max_tokens: left out
    rig.drain()
    rig.check_outputs()
    assert len(rig.plans) == 3


@pytest.mark.requirement("B3")
def test_threshold_caps_admission_and_resumption() -> None:
    rig = Rig(kv_config(), 1, long_prefill_token_threshold=5)
    rig.submit(submit(0, [1] * 12, max_tokens=2))
    rig.submit(submit(1, [2] * 12, max_tokens=2))
    counts = [planned(rig).prefill.count.tolist()]
    for _ in range(2):
        rig.commit()
        counts.append(planned(rig).prefill.count.tolist())
    assert counts == [[5, 5], [5, 5], [2, 2]]
    rig.drain()
    rig.check_outputs()


@pytest.mark.requirement("B1")
def test_exclusive_is_prefill_first_and_reserves_nothing() -> None:
    rig = Rig(kv_config(), 1, step_policy="exclusive")
    rig.submit(submit(0, [1] * 4, max_tokens=9))
    rig.step()
    rig.submit(submit(1, [2] * 30, max_tokens=2))
    plans = []
    for _ in range(3):
        plans.append(planned(rig))
        rig.commit()
    assert [(p.prefill.tokens, p.decode.tokens) for p in plans] == [(24, 0), (6, 0), (0, 2)]
    rig.drain()
    rig.check_outputs()


@pytest.mark.requirement("B5")
@pytest.mark.parametrize("depth", [1, 2])
def test_pure_plans_are_the_same_under_both_policies(depth: int) -> None:
    """Without prefill rows, or without decode rows, both policies make equal plans."""
    rigs = [Rig(kv_config(), depth, step_policy=policy) for policy in ("mixed", "exclusive")]
    for rig in rigs:
        for number in range(4):
            rig.submit(submit(number, [number] * 6, max_tokens=10))  # all prompts in one step
        rig.drain()
        rig.check_outputs()
    mixed, exclusive = (rig.plans for rig in rigs)
    assert len(mixed) == len(exclusive)
    assert all(same(a, b) for a, b in zip(mixed, exclusive, strict=True))
    assert all(not (p.prefill.rows and p.decode.rows) for p in mixed)


@pytest.mark.requirement("B1", "B2")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("threshold", [0, 6])
def test_steady_state_is_mixed(depth: int, threshold: int) -> None:
    """With waiting prompts and decoding sequences, at least 95% of steps have both kinds of rows."""
    kv = kv_config(blocks=400, slots=24)
    rig = Rig(kv, depth, max_num_seqs=16, max_num_batched_tokens=24, long_prefill_token_threshold=threshold)
    for number in range(150):
        rig.submit(submit(number, [number % 50] * (20 + number % 9), max_tokens=6 + number % 5))
    steady = []
    while rig.scheduler.has_work():
        before = rig.scheduler.stats()
        decoding = any(output.tokens and output.finish is None for output in rig.outputs.values())
        done = len(rig.plans)
        rig.step()
        if decoding and before.waiting:
            steady += rig.plans[done:]
    rig.check_outputs()
    assert len(steady) > 100
    assert sum(bool(p.prefill.rows and p.decode.rows) for p in steady) >= 0.95 * len(steady)
    assert rig.scheduler.stats().mixed_steps == sum(bool(p.prefill.rows and p.decode.rows) for p in rig.plans)


@pytest.mark.requirement("B1", "B2")
def test_running_decodes_get_a_token_every_step_beside_long_prompts() -> None:
    rig = Rig(kv_config(blocks=300), 2, max_num_seqs=8)
    for number in range(4):
        rig.submit(submit(number, [number], max_tokens=40))
    rig.step()
    for number in range(4, 24):
        rig.submit(submit(number, [number] * 40, max_tokens=1))
    for _ in range(30):
        have = [len(rig.outputs[n].tokens) for n in range(4)]
        rig.step()
        assert [len(rig.outputs[n].tokens) for n in range(4)] == [h + 1 for h in have]
    rig.drain()
    rig.check_outputs()


@pytest.mark.requirement("B4")
def test_a_younger_short_prompt_does_not_overtake() -> None:
    rig = Rig(kv_config(blocks=18), 1)
    rig.submit(submit(0, [1] * 20, max_tokens=20))
    rig.submit(submit(1, [2] * 40, max_tokens=4))  # does not fit beside the first sequence yet
    rig.submit(submit(2, [3], max_tokens=1))
    order = []
    while rig.scheduler.has_work():
        rig.step()
        order += [n for n in (0, 1, 2) if rig.outputs[n].tokens and n not in order]
    assert order == [0, 1, 2]
    rig.check_outputs()


def test_priority_goes_before_arrival() -> None:
    rig = Rig(kv_config(), 1, max_num_seqs=1)
    for number, priority in enumerate((0, 2, 1, -1)):
        rig.submit(submit(number, [number] * 3, priority=priority, max_tokens=2))
    order = []
    while rig.scheduler.has_work():
        rig.step()
        order += [n for n in range(4) if rig.outputs[n].tokens and n not in order]
    assert order == [3, 0, 2, 1]


def test_slots_are_freed_before_they_are_given_again() -> None:
    rig = Rig(kv_config(slots=1), 2, max_num_seqs=1)
    for number in range(3):
        rig.submit(submit(number, [number], max_tokens=2))
    rig.drain()
    rig.check_outputs()
    ops = [op for plan in rig.plans for op in plan.ops if isinstance(op, AllocSlot | FreeSlot)]
    assert [(type(op).__name__, op.slot, op.gen) for op in ops] == [
        ("AllocSlot", 0, 1),
        ("FreeSlot", 0, 1),
        ("AllocSlot", 0, 2),
        ("FreeSlot", 0, 2),
        ("AllocSlot", 0, 3),
    ]


def test_steps_commit_in_order() -> None:
    rig = Rig(kv_config(), 2)
    rig.submit(submit(0, [1], max_tokens=5))
    rig.plan()
    rig.plan()
    plan, result = rig.in_flight[1]
    with pytest.raises(EngineDead, match="order"):
        rig.scheduler.commit(plan, result, 0.0)


def test_a_step_computes_a_bounded_number_of_prompt_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with logprobs share a limit of logit rows, and all logprobs arrive in the end."""
    monkeypatch.setattr("weft.scheduler.plan_builder.MAX_PROMPT_LOGITS", 10)
    rig = Rig(kv_config(), 2)
    for number in range(3):
        rig.submit(submit(number, list(range(1, 25)), prompt_logprobs=1, max_tokens=3))
    rig.submit(submit(9, list(range(1, 20)), max_tokens=3))
    asked: list[int] = []
    plan = rig.scheduler.plan

    def watched(now: float) -> StepPlan | None:
        made = plan(now)
        if made is not None:
            asked.append(sum(int((s.logits - s.sample).sum()) for s in (made.prefill, made.decode)))
        return made

    monkeypatch.setattr(rig.scheduler, "plan", watched)
    rig.drain()
    rig.check_outputs()
    assert max(asked) == 10
    assert sum(asked) == 3 * 23
