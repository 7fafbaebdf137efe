"""Small pools: every sequence finishes, preemptions are few, and no stall is silent."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.fake_runner import VOCAB, kv_config, submit
from tests.scheduler.harness import Rig
from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError, EngineDead, Overloaded
from weft.kv.caches import Caches
from weft.scheduler.scheduler import MAX_EMPTY_PLANS
from weft.scheduler.sequence import PROTECT_AFTER


@pytest.mark.requirement("F42")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["mixed", "exclusive"])
@mostly_slow("window", [None, 7], [7])
def test_one_and_a_half_sequences(depth: int, policy: str, window: int | None) -> None:
    rng = random.Random(f"{depth} {policy} {window}")
    kv = kv_config(blocks=18, window=window, window_blocks=9, max_model_len=48)
    rig = Rig(kv, depth, step_policy=policy)
    for number in range(200):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        stop = tuple(sorted(rng.sample(range(VOCAB), rng.randint(0, 2))))
        rig.submit(submit(number, prompt, max_tokens=rng.randint(1, 48), stop_ids=stop))
    while rig.scheduler.has_work():
        rig.step()
        if rng.random() < 0.1:
            rig.finish(rng.randrange(200))
    rig.check_outputs()
    rig.check_idle()
    stats = rig.scheduler.stats()
    assert stats.preemptions > 0
    assert rig.most_preempted <= 2


def test_a_long_tail_of_growing_sequences() -> None:
    """All sequences use the whole context: the worst case for recomputation."""
    rig = Rig(kv_config(blocks=18, max_model_len=48, caching=False), 2)
    for number in range(40):
        rig.submit(submit(number, [number], max_tokens=47))
    rig.drain(20000)
    rig.check_outputs()
    rig.check_idle()
    assert rig.most_preempted == 2


def test_victim_is_the_last_in_priority_then_arrival() -> None:
    rig = Rig(kv_config(blocks=12, max_model_len=48), 1, max_num_seqs=3)
    rig.submit(submit(0, [1] * 12, max_tokens=36, priority=1))
    rig.submit(submit(1, [2] * 12, max_tokens=36))
    rig.submit(submit(2, [3] * 12, max_tokens=36))
    while not rig.scheduler.stats().preemptions:
        rig.step()
    waiting = [s.id for s in rig.scheduler._state.waiting]
    assert waiting == [0]
    rig.drain()
    rig.check_outputs()


def test_blocks_about_to_be_freed_cause_no_preemption() -> None:
    rig = Rig(kv_config(blocks=12, max_model_len=48), 2, max_num_seqs=2)
    rig.submit(submit(0, [1] * 17, max_tokens=20))
    rig.submit(submit(1, [2] * 19, max_tokens=25))
    while len(rig.plans) < 7:
        if len(rig.in_flight) == 2:
            rig.commit()
        rig.plan()
    assert rig.scheduler.stats().free_blocks == (0,)
    rig.commit()
    rig.finish(0)  # a plan in flight uses the blocks of the sequence
    assert rig.scheduler.stats().free_blocks == (0,)
    assert rig.plan() is None  # the other sequence lacks a block and is left out
    rig.commit()
    assert rig.scheduler.stats().free_blocks == (6,)
    rig.drain()
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions == 0


@pytest.mark.requirement("F11")
def test_one_sequence_alone_passes_a_minimal_pool() -> None:
    """A window group has a pool that holds little more than the window. Chunks are cut to fit."""
    kv = kv_config(full=False, window=6, window_blocks=3, max_model_len=48, caching=False)
    rig = Rig(kv, 2)
    rig.submit(submit(0, [5] * 40, max_tokens=8))
    rig.submit(submit(1, [6] * 30, max_tokens=18))
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


@pytest.mark.requirement("F11")
def test_pool_that_cannot_pin_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Rig(kv_config(blocks=11, max_model_len=48))
    assert "--kv-cache-memory" in caught.value.message
    assert "--max-model-len" in caught.value.message


@pytest.mark.requirement("B2")
def test_budget_that_leaves_prefill_less_than_a_block_is_refused() -> None:
    Rig(kv_config(), max_num_seqs=8, max_num_batched_tokens=11)
    with pytest.raises(ConfigError) as caught:
        Rig(kv_config(), max_num_seqs=8, max_num_batched_tokens=10)
    assert "--max-num-batched-tokens" in caught.value.message
    assert "--max-num-seqs" in caught.value.message


@pytest.mark.requirement("F31")
def test_full_queue_is_refused_and_the_admitted_finish() -> None:
    """The limit is ``max_num_seqs`` plus the queue, also before the first step."""
    rig = Rig(kv_config(), max_num_seqs=2, max_queued_requests=3)
    for number in range(5):
        rig.submit(submit(number, [1, 2, 3]))
    with pytest.raises(Overloaded) as caught:
        rig.scheduler.add(submit(5, [1]), 0.0)
    assert caught.value.retryable
    rig.step()
    with pytest.raises(Overloaded):
        rig.scheduler.add(submit(5, [1]), 0.0)
    rig.drain()
    rig.check_outputs()
    rig.submit(submit(5, [1]))
    rig.drain()
    rig.check_outputs()


@pytest.mark.requirement("F41")
def test_no_progress_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(kv_config())
    rig.submit(submit(0, [1, 2, 3]))
    monkeypatch.setattr(Caches, "fits", lambda self, needed: False)
    for _ in range(MAX_EMPTY_PLANS - 1):
        assert rig.plan() is None
    with pytest.raises(EngineDead, match="waiting 1") as caught:
        rig.plan()
    assert "free blocks (64,)" in caught.value.message


def test_waiting_for_a_commit_is_not_taken_for_a_stall() -> None:
    rig = Rig(kv_config(), 2)
    rig.submit(submit(0, [1, 2, 3], max_tokens=1))
    rig.plan()
    for _ in range(1000):
        assert rig.plan() is None
    rig.drain()
    rig.check_outputs()


def test_blocks_promised_to_prefills_are_not_there_for_admission() -> None:
    """A long prompt in chunks keeps a claim on all needed blocks, even on blocks that are still free."""
    rig = Rig(kv_config(blocks=12, caching=False), 1, long_prefill_token_threshold=8)
    rig.submit(submit(0, [1] * 40, max_tokens=2))
    rig.submit(submit(1, [2] * 8, max_tokens=2))  # fits in the first step
    rig.plan()
    rig.commit()
    rig.submit(submit(2, [3] * 8, max_tokens=2))  # arrives during the prefill
    while not rig.outputs[0].tokens:
        assert [s.id for s in rig.scheduler._state.running] == [0]
        rig.step()
    rig.drain()
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions == 0


def test_the_protected_run_side_by_side_only_where_all_can_grow() -> None:
    rig = Rig(kv_config(blocks=12, caching=False), 1)
    for number, limit in enumerate((30, 30, 6)):
        rig.submit(submit(number, [number] * 4, max_tokens=limit - 4))
        rig.scheduler._state.live[number].preemptions = PROTECT_AFTER
    together = []
    while rig.scheduler.has_work():
        rig.step()
        together.append([s.id for s in rig.scheduler._state.running])
    assert [0] in together
    assert not any(0 in ids and 1 in ids for ids in together)  # 8 blocks each, of 12
    assert [1, 2] in together
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions == 0
