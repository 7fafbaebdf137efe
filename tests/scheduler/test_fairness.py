"""Slots are shared between client requests: a large request does not keep out a small request."""

from __future__ import annotations

import random
from array import array
from bisect import insort
from collections.abc import Collection
from operator import attrgetter
from typing import Any

import pytest

from tests.scheduler.fake_runner import VOCAB, kv_config, submit
from tests.scheduler.harness import Rig
from tests.scheduler.test_steps import same
from tests.support.slow import mostly_slow, seeds
from weft.scheduler import crowding as crowding_module
from weft.scheduler import state as state_module
from weft.scheduler.policy.queue import PASSES, FairQueue, SequenceQueue
from weft.scheduler.sequence import MOST_YIELDS, Sequence
from weft.types.plan import AllocSlot

LARGE, OTHER = 1 << 40, 1 << 41


def running(rig: Rig) -> list[int]:
    return [s.id for s in rig.scheduler._state.running]


def flood(rig: Rig, count: int, first: int = 0, owner: int = LARGE, **params: Any) -> None:
    """Submit one client request of ``count`` sequences, with four choices for each prompt."""
    params.setdefault("max_tokens", 40)
    for number in range(first, first + count):
        prompt, choice = divmod(number - first, 4)
        request = first + 4 * prompt
        tokens = [prompt % VOCAB, owner % 7, 3]
        seed = number + 1000  # identifies the sequence in AllocSlot
        rig.submit(submit(number, tokens, request=request, choice=choice, owner=owner, seed=seed, **params))


def admissions(rig: Rig) -> list[int]:
    """Return the numbers of the sequences in the order of their first slots."""
    seeds = [op.seed for plan in rig.plans for op in plan.ops if isinstance(op, AllocSlot)]
    return list(dict.fromkeys(seeds))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_jth_of_a_large_request_comes_after_the_next_j_requests(depth: int) -> None:
    """With one slot no client request ever runs more than another. The position in the queue alone
    decides."""
    rig = Rig(kv_config(), depth, max_num_seqs=1)
    for number in range(4):
        rig.submit(submit(number, [number], seed=number, max_tokens=2, owner=LARGE))
    for number in range(4, 7):
        rig.submit(submit(number, [number], seed=number, max_tokens=2))
    for number in range(7, 9):
        rig.submit(submit(number, [number], seed=number, max_tokens=2, owner=OTHER))
    rig.drain()
    rig.check_outputs()
    # Positions: 0, 1, 2, 3 for the large request; 1, 2, 3; 4, 5. Equal positions: by arrival.
    assert admissions(rig) == [0, 1, 4, 2, 5, 3, 6, 7, 8]
    assert rig.scheduler.stats().preemptions == 0


@pytest.mark.requirement("B4")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["mixed", "exclusive"])
@pytest.mark.parametrize("spare", [1, 2])
def test_a_late_small_request_runs_at_once_beside_a_thousand_parallel_samples(
    depth: int, policy: str, spare: int
) -> None:
    """``spare``: slots for each running sequence; an engine has one for each step in flight."""
    kv = kv_config(blocks=400, slots=8 * spare)
    rig = Rig(kv, depth, max_num_seqs=8, max_queued_requests=2048, step_policy=policy)
    flood(rig, 1024)
    for _ in range(8):
        rig.step()
    assert len(running(rig)) == 8
    rig.submit(submit(5000, [9, 9], max_tokens=3))
    before, ran = len(rig.plans), running(rig)
    while not rig.outputs[5000].tokens:
        rig.step()
    assert len(rig.plans) - before <= 4 if policy == "mixed" else 8
    while rig.outputs[5000].finish is None:
        assert 5000 in running(rig)
        rig.step()
    assert [rig.scheduler._state.live[n].yielded for n in ran] == [False] * 7 + [True]  # the last in order
    assert rig.scheduler.stats().preemptions == 1  # no second preemption while the slot is not yet free
    for _ in range(depth + 1):
        rig.step()
    assert len(running(rig)) == 8  # the large request has the slot again
    rig.audit()


@pytest.mark.parametrize("depth", [1, 2])
def test_shares_become_even_and_stay(no_turns: None, depth: int) -> None:
    """Three clients want all slots. Each gets a third, and then no sequence gives up a slot again."""
    rig = Rig(kv_config(blocks=900, slots=12), depth, max_num_seqs=12, max_queued_requests=2048)
    for client in range(3):
        flood(rig, 60, 100 * client, LARGE + client)
        for _ in range(12):
            rig.step()
    counts = [sum(n // 100 == client for n in running(rig)) for client in range(3)]
    assert counts == [4, 4, 4]
    preempted = rig.scheduler.stats().preemptions
    assert preempted == 6 + 4  # 12 -> 6, 6 -> 4, 4, 4
    for _ in range(15):  # no sequence ends meanwhile
        rig.step()
        rig.audit()
    assert rig.scheduler.stats().preemptions == preempted
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


@pytest.mark.requirement("B4")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_of_small_requests_starves_nobody(depth: int) -> None:
    """A stream of small requests exceeds the slots. The large request progresses as one client among many."""
    rig = Rig(kv_config(blocks=400, slots=4 * depth), depth, max_num_seqs=4, max_queued_requests=2048)
    flood(rig, 24, max_tokens=12)
    number, waits = 1000, list[int]()
    while any(rig.outputs[n].finish is None for n in range(24)):
        assert number < 4000, "the large request does not end"
        small = [n for n in rig.outputs if n >= 1000 and rig.outputs[n].finish is None]
        for _ in range(6 - len(small)):
            rig.submit(submit(number, [number % VOCAB, 5], max_tokens=4))
            number += 1
        rig.step()
        waits.append(sum(not rig.outputs[n].tokens for n in rig.outputs if n >= 1000))
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    assert max(waits) <= 7


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_gives_way_at_most_once(no_turns: None, depth: int) -> None:
    rig = Rig(kv_config(blocks=400, slots=4 * depth), depth, max_num_seqs=4)
    flood(rig, 4, max_tokens=44)
    for _ in range(3):
        rig.step()
    for number in range(100, 108):  # one small request after the other
        rig.submit(submit(number, [number % VOCAB], max_tokens=1))
        while rig.outputs[number].finish is None:
            rig.step()
        for _ in range(2):
            rig.step()
    assert rig.scheduler.stats().preemptions == 4
    assert {rig.scheduler._state.live[n].preemptions for n in range(4) if n in rig.scheduler._state.live} <= {
        1
    }
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    assert rig.most_preempted == 1


def test_giving_way_brings_no_protection() -> None:
    """Only preemptions for lack of blocks protect a sequence, because protection may delay a fair share."""
    sequence = Sequence(submit(0, [1]), array("i", [1]), 1, 9, 0)
    protected = []
    for sequence.preemptions, sequence.yielded in ((1, True), (2, True), (3, True), (1, False), (2, False)):
        protected.append(sequence.protected)
    assert protected == [False, False, True, False, True]


def test_the_protected_do_not_give_way() -> None:
    rig = Rig(kv_config(blocks=400), 1, max_num_seqs=4)
    flood(rig, 4, max_tokens=20)
    rig.step()
    rig.step()
    for number in range(4):
        rig.scheduler._state.live[number].preemptions = 2
    rig.submit(submit(9, [9], max_tokens=2))
    for _ in range(5):
        rig.step()
        assert running(rig) == [0, 1, 2, 3]
    assert rig.scheduler.stats().preemptions == 0
    rig.drain()
    rig.check_outputs()


def test_fairness_is_among_equal_priorities() -> None:
    rig = Rig(kv_config(blocks=400), 1, max_num_seqs=4)
    flood(rig, 8, max_tokens=10)
    for _ in range(3):
        rig.step()
    before = running(rig)
    rig.submit(submit(100, [1], seed=100, max_tokens=2, priority=1))  # less urgent
    rig.submit(
        submit(101, [2], seed=101, max_tokens=2, priority=-1)
    )  # more urgent: gets the next free slot; no running sequence gives up a slot
    for _ in range(3):
        rig.step()
    assert running(rig) == before
    rig.drain()
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions == 0
    assert admissions(rig)[4] == 101
    assert admissions(rig)[-1] == 100


def test_without_free_blocks_no_sequence_gives_way() -> None:
    """A slot would not help: the late sequence waits for blocks."""
    rig = Rig(kv_config(blocks=13, caching=False), 1, max_num_seqs=4)
    flood(rig, 4, max_tokens=8)
    for _ in range(2):
        rig.step()
    rig.submit(submit(100, list(range(40)), max_tokens=2))
    for _ in range(3):
        rig.step()
        assert running(rig) == [0, 1, 2, 3]
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    assert rig.scheduler.stats().preemptions == 0


class Arrivals(SequenceQueue):
    """First come, first served, by (priority, arrival). This reference replaces the fair queue."""

    large = 0

    def enter(self, sequence: Sequence) -> None:
        priority, _, arrival = sequence.key
        sequence.key = (priority, arrival, arrival)

    def leave(self, sequence: Sequence) -> None:
        pass

    def start(self, sequence: Sequence) -> None:
        self.remove(sequence)

    def stop(self, sequence: Sequence) -> None:
        pass


@pytest.mark.requirement("B4")
@pytest.mark.parametrize("depth", [1, 2])
def test_with_one_sequence_an_owner_plans_are_those_of_first_come_first_served(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(seed: int) -> Rig:
        # The random numbers depend only on the seed, so that both queues get the same load.
        rng = random.Random(seed)
        rig = Rig(kv_config(blocks=rng.choice([14, 64]), slots=3 * depth), depth, max_num_seqs=3)
        for number in range(40):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
            priority = rng.choice([0, 0, 1])
            rig.submit(submit(number, prompt, max_tokens=rng.randint(1, 20), priority=priority))
            for _ in range(rng.randint(0, 3)):
                rig.step()
        rig.drain()
        rig.check_outputs()
        return rig

    fair = [run(seed) for seed in range(3)]
    monkeypatch.setattr(state_module, "FairQueue", Arrivals)
    plain = [run(seed) for seed in range(3)]
    assert sum(rig.scheduler.stats().preemptions for rig in plain) > 0
    for one, other in zip(fair, plain, strict=True):
        assert len(one.plans) == len(other.plans)
        assert all(same(a, b) for a, b in zip(one.plans, other.plans, strict=True))


@pytest.mark.requirement("F42")
@seeds(7, 14, 40)
@mostly_slow("turn", [3, 128], [3])
@pytest.mark.parametrize("depth", [1, 2])
def test_random_loads_of_several_clients(
    depth: int, turn: int, seeds: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence gets the tokens of a run alone, in any order of preemptions."""
    monkeypatch.setattr(crowding_module, "TURN", turn)
    yielded = 0
    for seed in seeds:
        rng = random.Random(seed)
        kv = kv_config(
            blocks=rng.choice([14, 30, 120]),
            slots=rng.choice([4, 4 * depth]),
            caching=rng.random() < 0.7,
            window=rng.choice([None, None, 6]),
            states=rng.choice([0, 0, 5]),
            copies=rng.choice([1, 1, 3]),
        )
        policy = rng.choice(["mixed", "exclusive"])
        rig = Rig(kv, depth, max_num_seqs=4, step_policy=policy)
        rig.runner.right = 0.7
        for number in range(60):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            owner = rng.choice([0, 0, LARGE, LARGE, OTHER])
            rig.submit(submit(number, prompt, owner=owner, max_tokens=rng.randint(1, 20)))
            for _ in range(rng.choice([0, 0, 0, 3])):
                rig.step()
                rig.audit()
                yielded += sum(s.yielded for s in rig.scheduler._state.waiting)
            if rng.random() < 0.1:
                rig.finish(rng.randrange(number + 1))
            if rng.random() < 0.02:
                rig.lose()
        rig.drain()
        rig.check_outputs()
        rig.check_idle()
    assert yielded > 0


TURN = 10
LONG = {"max_model_len": 40 * TURN, "blocks": 500}


@pytest.fixture
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable turns: slots are given up for fair shares only."""
    monkeypatch.setattr(crowding_module, "TURN", 1 << 30)


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding_module, "TURN", TURN)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_request_gets_in_where_long_ones_have_all_slots(short_turns: None, depth: int) -> None:
    """Each sequence is a client request: no client request runs more than another."""
    rig = Rig(kv_config(slots=4 * depth, **LONG), depth, max_num_seqs=4)
    for number in range(4):
        rig.submit(submit(number, [number], max_tokens=30 * TURN))
    for _ in range(TURN + 2):
        rig.step()
    waits = []
    for number in range(100, 112):
        rig.submit(submit(number, [number % VOCAB], max_tokens=2))
        before = len(rig.plans)
        while rig.outputs[number].finish is None:
            rig.step()
        waits.append(len(rig.plans) - before)
        while len(running(rig)) < 4:  # the preempted sequence runs again
            rig.step()
    # The first four find a sequence with a completed turn. The next wait until another turn is complete.
    assert max(waits[:4]) <= 8
    assert max(waits) <= TURN + 8
    yielded = [rig.scheduler._state.live[n].yielded for n in range(4)]
    assert sum(yielded) == 12
    assert max(yielded) - min(yielded) <= 1
    rig.audit()
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


@pytest.mark.requirement("B4")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_flood_of_small_requests_does_not_stop_long_ones(short_turns: None, depth: int) -> None:
    rig = Rig(kv_config(slots=2 * depth, **LONG), depth, max_num_seqs=2)
    for number in range(2):
        rig.submit(submit(number, [number], max_tokens=30 * TURN))
    number = 100
    while rig.outputs[0].finish is None or rig.outputs[1].finish is None:
        small = [n for n in rig.outputs if n >= 100 and rig.outputs[n].finish is None]
        if not small:
            rig.submit(submit(number, [number % VOCAB], max_tokens=1))
            number += 1
        rig.step()
    rig.drain()
    rig.check_outputs()
    assert rig.most_preempted == MOST_YIELDS


def test_a_newcomer_that_is_long_returns_the_slot_after_its_turn(short_turns: None) -> None:
    """Afterwards the order is first come, first served: long requests end in order of arrival."""
    rig = Rig(kv_config(slots=2, **LONG), 1, max_num_seqs=2)
    for number in range(4):
        rig.submit(submit(number, [number], max_tokens=10 * TURN))
    first = {}
    while len(first) < 4:
        rig.step()
        for number in range(4):
            if number not in first and rig.outputs[number].tokens:
                first[number] = len(rig.plans)
    assert first[2] <= TURN + 8  # no sequence of the first two has ended yet
    ends = []
    while len(ends) < 4:
        rig.step()
        ends += [n for n in range(4) if rig.outputs[n].finish is not None and n not in ends]
    assert sorted(ends[:2]) == [0, 1]
    assert sorted(ends[2:]) == [2, 3]
    rig.check_outputs()
    rig.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_parallel_samples_do_not_take_turns(short_turns: None, depth: int) -> None:
    """Only sequences of one client request wait. A later start of one sample gains nothing for the client."""
    rig = Rig(kv_config(slots=4 * depth, **LONG), depth, max_num_seqs=4)
    flood(rig, 12, max_tokens=4 * TURN)
    rig.drain()
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_newcomers_of_a_large_request_do_not_take_slots_of_small_ones(short_turns: None, depth: int) -> None:
    rig = Rig(kv_config(slots=4 * depth, **LONG), depth, max_num_seqs=4)
    for number in (100, 101):
        rig.submit(submit(number, [number % VOCAB], max_tokens=20 * TURN))
    for _ in range(TURN + 3):
        rig.step()
    flood(rig, 12, max_tokens=4 * TURN)
    for _ in range(6 * TURN):
        rig.step()
        assert {100, 101} <= set(running(rig))
    rig.drain()
    rig.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_admitted_in_the_same_plan_does_not_give_way(depth: int) -> None:
    """A sequence admitted in the same plan does not give up a slot: ranks cannot free an unknown slot."""
    for steps in range(4):
        rig = Rig(kv_config(blocks=400, slots=4), depth, max_num_seqs=4)
        flood(rig, 3)
        rig.submit(submit(100, [1], owner=OTHER, max_tokens=30))
        for _ in range(5):
            rig.step()
        rig.submit(submit(101, [1, 2], owner=OTHER, max_tokens=30))  # one of the large request gives way
        if len(rig.in_flight) == depth:
            rig.commit()
        rig.plan()
        for _ in range(steps):
            rig.step()
        rig.submit(submit(200, [5], max_tokens=3))  # before or after the admission of 101
        rig.drain()
        rig.check_outputs()
        rig.check_idle()


def test_without_a_prefix_cache_no_sequence_gives_way(short_turns: None) -> None:
    rig = Rig(kv_config(slots=2, caching=False, **LONG), 1, max_num_seqs=2)
    for number in range(2):
        rig.submit(submit(number, [number], max_tokens=3 * TURN))
    for _ in range(2 * TURN):
        rig.step()
    rig.submit(submit(100, [1], max_tokens=1))
    rig.drain()
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions == 0


def test_the_queue_keeps_its_order_whatever_changes() -> None:
    """The queue equals a plain sort of all waiting sequences, with a list of how often each was passed by."""
    rng, queue = random.Random(0), FairQueue()
    waiting: list[Sequence] = []
    runs: list[Sequence] = []
    passed: dict[int, int] = {}  # by priority; the priority that was passed by for longest comes first
    overdue = 0
    for number in range(4000):
        kind = rng.randrange(5)
        if kind < 2 and len(waiting) + len(runs) < 60:
            request = submit(number, [1], owner=1 + rng.randrange(9), priority=rng.choice([0, 1, 2]))
            sequence = Sequence(request, array("i", [1]), 1, 9, number)
            queue.enter(sequence)
            queue.add(sequence)
            insort(waiting, sequence, key=attrgetter("key"))
        elif kind == 2 and waiting:
            queue.start(waiting[0] if rng.random() < 0.5 else queue.first())
            started = [s for s in waiting if s not in list(queue)]
            waiting.remove(started[0])
            runs.append(started[0])
            passed.pop(started[0].key[0])
            passed = {priority: times + 1 for priority, times in passed.items()} | {started[0].key[0]: 0}
        elif kind == 3 and runs:
            stopped = runs.pop(rng.randrange(len(runs)))
            queue.stop(stopped)
            if rng.random() < 0.5:
                queue.add(stopped)
                insort(waiting, stopped, key=attrgetter("key"))
            else:
                queue.leave(stopped)
        elif kind == 4 and waiting:
            gone = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(gone)
            queue.leave(gone)
        count = {id(s.share): sum(r.share is s.share for r in runs) for s in waiting}
        there = {s.key[0] for s in waiting}
        passed = {priority: times for priority, times in passed.items() if priority in there}
        passed |= {priority: 0 for priority in there if priority not in passed}
        if waiting:
            oldest = next(iter(passed))
            late = passed[oldest] >= PASSES and oldest > min(there)
            overdue += late
            mine = [s for s in waiting if s.key[0] == oldest] if late else waiting
            first = min(mine, key=lambda s: (s.key[0], count[id(s.share)], s.key))
            assert queue.first() is first
        assert len(queue) == len(waiting)
        assert sorted(s.id for s in queue) == sorted(s.id for s in waiting)
    assert overdue > 20
