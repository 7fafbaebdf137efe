"""Sequences of batches compute with what online sequences leave, and change no token and at most one step."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.fake_runner import VOCAB, kv_config, submit
from tests.scheduler.harness import Rig
from tests.scheduler.test_fairness import LONG, admissions, running
from tests.support.slow import mostly_slow
from weft.scheduler.planner import SIDE_BYTES
from weft.scheduler.policy import queue as queue_module
from weft.scheduler.policy.batch_rows import EVERY
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.sequence import Sequence
from weft.types.priority import BATCH_PRIORITY


def first_steps(batch: bool, depth: int, seed: int, blocks: int = 500) -> dict[int, int]:
    """Return online sequence -> steps from the arrival to its first token, with or without a batch."""
    rng = random.Random(seed)
    rig = Rig(kv_config(slots=4 * depth, max_model_len=200, blocks=blocks), depth, max_num_seqs=4)
    if batch:
        for number in range(40):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            # The API server admits no more lines than there are free slots: here all at once, the worst case.
            rig.submit(submit(1000 + number, prompt, max_tokens=60, priority=BATCH_PRIORITY, owner=77))
    rng = random.Random(seed + 1)
    arrived: dict[int, int] = {}
    took: dict[int, int] = {}
    number = 0
    while number < 60 or len(took) < number:
        if number < 60 and rng.random() < 0.3:
            arrived[number] = len(rig.plans)
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            rig.submit(submit(number, prompt, max_tokens=rng.randint(1, 12)))
            number += 1
        rig.step()
        rig.audit()
        for one, at in arrived.items():
            if one not in took and rig.outputs[one].tokens:
                took[one] = len(rig.plans) - at
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    return took


@mostly_slow("depth, blocks", [(1, 500), (2, 500), (2, 60)], [(2, 60)])
def test_online_sequences_wait_at_most_one_more_step(depth: int, blocks: int) -> None:
    """Counted in steps, at equal arrivals, with a batch that takes every slot and every free block."""
    more = []
    for seed in range(2):
        alone, beside = (first_steps(batch, depth, seed, blocks) for batch in (False, True))
        more += [beside[one] - alone[one] for one in alone]
    assert max(more) <= 1, sorted(more)[-10:]
    assert sum(more) / len(more) < 0.5


def test_batches_get_no_slot_while_online_sequences_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike other low priorities, which get one slot in ``PASSES``."""
    monkeypatch.setattr(queue_module, "PASSES", 4)
    rig = Rig(kv_config(slots=2), 1, max_num_seqs=2)
    rig.submit(submit(90, [1], seed=90, max_tokens=2, priority=BATCH_PRIORITY + 3))
    rig.submit(submit(91, [1], seed=91, max_tokens=2, priority=BATCH_PRIORITY - 1))
    for number in range(30):
        rig.submit(submit(number, [number % VOCAB], seed=number, max_tokens=2))
    rig.drain()
    rig.check_outputs()
    order = admissions(rig)
    assert order[-1] == 90
    assert order.index(91) < 10


def test_a_batch_gives_up_its_slots_at_once() -> None:
    rig = Rig(kv_config(slots=8, **LONG), 2, max_num_seqs=4)
    for number in range(4):
        rig.submit(submit(10 + number, [number], max_tokens=50, priority=BATCH_PRIORITY, owner=5))
    for _ in range(4):
        rig.step()
    assert sorted(running(rig)) == [10, 11, 12, 13]
    for number in range(3):
        rig.submit(submit(number, [number], max_tokens=20))
    rig.step()
    assert sorted(running(rig)) == [0, 1, 2, 10]
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_a_step_with_an_online_prompt_has_no_rows_of_batches() -> None:
    """Except each eighth such step, so that a batch beside online prompts goes on."""
    rig = Rig(kv_config(slots=8, max_model_len=400, blocks=500), 1, max_num_seqs=4, max_num_batched_tokens=50)
    for number in range(2):
        prompt = [number + 5] * 90
        rig.submit(submit(100 + number, prompt, max_tokens=200, priority=BATCH_PRIORITY, owner=5))
    for _ in range(8):
        rig.step()
    began = len(rig.plans)
    for number in range(2):
        rig.submit(submit(number, [number] * 390, max_tokens=1))
    for _ in range(2 * EVERY):
        rig.step()
    rows = [len(plan.decode.slot) for plan in rig.plans[began:]]
    assert rows == [*[0] * (EVERY - 1), 2] * 2
    assert all(len(plan.prefill.slot) for plan in rig.plans[began:])
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_a_batch_does_not_pause_while_an_online_prompt_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has the memory beside KV that the prompt needs, so a pause would only delay the prompt."""
    set_cost = Scheduler._count_cost

    def costly(self: Scheduler, sequence: Sequence) -> None:
        set_cost(self, sequence)
        sequence.side_bytes = SIDE_BYTES if sequence.id in (2, 100) else 0

    monkeypatch.setattr(Scheduler, "_count_cost", costly)
    rig = Rig(kv_config(slots=8, max_model_len=100, blocks=200), 1, max_num_seqs=4)
    rig.submit(submit(100, [5], max_tokens=30, priority=BATCH_PRIORITY, owner=5))
    rig.submit(submit(1, [1], max_tokens=80))
    for _ in range(3):
        rig.step()
    rig.submit(submit(2, [2], max_tokens=2))
    began = len(rig.plans)
    while not rig.outputs[2].tokens:
        rig.step()
    assert 20 < len(rig.plans) - began < 35
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
