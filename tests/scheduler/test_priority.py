"""Priority decides admission, preemption and giving up slots, and no sequence waits forever."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.fake_runner import VOCAB, kv_config, submit
from tests.scheduler.harness import Rig
from tests.scheduler.test_fairness import LONG, TURN, admissions, running
from tests.support.slow import mostly_slow
from weft.scheduler import crowding as crowding_module
from weft.scheduler.policy import queue as queue_module
from weft.scheduler.sequence import MOST_YIELDS


def test_admission_follows_priority_and_of_equals_arrival() -> None:
    rig = Rig(kv_config(), 1, max_num_seqs=1)
    for number, priority in enumerate([0, 5, -3, 0, -3, 5]):
        rig.submit(submit(number, [number], seed=number, max_tokens=2, priority=priority))
    rig.drain()
    rig.check_outputs()
    assert admissions(rig) == [2, 4, 0, 3, 1, 5]


@pytest.mark.parametrize("depth", [1, 2])
def test_where_blocks_are_short_the_least_urgent_goes(depth: int) -> None:
    """The urgent sequence came last. By arrival alone it would lose its blocks."""
    rig = Rig(kv_config(blocks=13, slots=3 * depth), depth, max_num_seqs=3)
    for number, priority in enumerate([1, 2, 0]):
        rig.submit(submit(number, [number] * 12, max_tokens=30, priority=priority))
    ends: list[int] = []
    while len(ends) < 3:
        rig.step()
        ends += [n for n in range(3) if rig.outputs[n].finish is not None and n not in ends]
    rig.check_outputs()
    assert ends == [2, 0, 1]
    assert rig.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_an_urgent_newcomer_gets_a_slot_after_a_turn(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with no more running sequences give up a slot too, except clients of the same priority."""
    monkeypatch.setattr(crowding_module, "TURN", TURN)
    rig = Rig(kv_config(slots=3 * depth, **LONG), depth, max_num_seqs=3)
    for number in range(2):
        rig.submit(submit(number, [number], max_tokens=30 * TURN, owner=number + 1, priority=7))
    rig.submit(submit(2, [2], max_tokens=30 * TURN, owner=99))
    for _ in range(TURN + 2):
        rig.step()
    rig.submit(submit(50, [5], max_tokens=2 * TURN, owner=99))  # owner 99 runs 2 already
    before = len(rig.plans)
    while 50 not in running(rig):
        rig.step()
    assert len(rig.plans) - before <= 3
    assert running(rig) == [2, 50, 0]  # the last in order gave up its slot
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_a_sequence_gives_way_after_a_turn_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding_module, "TURN", TURN)
    rig = Rig(kv_config(slots=1, **LONG), 1, max_num_seqs=1)
    rig.submit(submit(0, [0], max_tokens=30 * TURN, priority=1))
    number = 100
    while rig.outputs[0].finish is None:
        if all(output.finish is not None for n, output in rig.outputs.items() if n >= 100):
            rig.submit(submit(number, [number % VOCAB], max_tokens=1))
            number += 1
        rig.step()
    rig.drain()
    rig.check_outputs()
    assert rig.most_preempted == MOST_YIELDS


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("priorities", [(1,), (1, 2, 3)])
def test_the_least_urgent_get_one_slot_in_so_many(
    depth: int, priorities: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Urgent sequences arrive without end. Sequences of every other priority still finish."""
    monkeypatch.setattr(queue_module, "PASSES", 6)
    rig = Rig(kv_config(slots=2 * depth), depth, max_num_seqs=2)
    late = {priority: 1000 + priority for priority in priorities}
    for number in range(4):
        rig.submit(submit(number, [number], seed=number, max_tokens=2))
    for priority, number in late.items():
        rig.submit(submit(number, [number % VOCAB], seed=number, max_tokens=2, priority=priority))
    number = 4
    while any(rig.outputs[n].finish is None for n in late.values()):
        waiting = len(rig.scheduler._state.waiting)
        for _ in range(max(0, 4 + len(late) - waiting)):
            rig.submit(submit(number, [number % VOCAB], seed=number, max_tokens=2))
            number += 1
        rig.step()
        assert number < 200
    rig.drain()
    rig.check_outputs()
    places = [admissions(rig).index(n) for n in late.values()]
    assert places == sorted(places)
    assert places[0] >= 6
    assert places[-1] <= 6 + 2 * len(late)


@mostly_slow("depth", [1, 2], [2])
def test_random_priorities_change_no_token(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence gets the tokens of a run alone, in any order."""
    monkeypatch.setattr(crowding_module, "TURN", 3)
    monkeypatch.setattr(queue_module, "PASSES", 5)
    yielded = 0
    for seed in range(10):
        rng = random.Random(seed)
        kv = kv_config(blocks=rng.choice([14, 40]), slots=3 * depth, window=rng.choice([None, 6]))
        rig = Rig(kv, depth, max_num_seqs=3)
        for number in range(50):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            priority = rng.choice([0, 0, 1, -2, 1 << 40])
            rig.submit(submit(number, prompt, priority=priority, max_tokens=rng.randint(1, 20)))
            for _ in range(rng.randint(0, 3)):
                rig.step()
                rig.audit()
                yielded += sum(s.yielded for s in rig.scheduler._state.waiting)
            if rng.random() < 0.05:
                rig.finish(rng.randrange(number + 1))
        rig.drain()
        rig.check_outputs()
        rig.check_idle()
    assert yielded > 0
