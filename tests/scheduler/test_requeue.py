"""Lost ranks: running sequences are recomputed, and clients get the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Rig, random_run
from tests.support.slow import mostly_slow, seeds


@pytest.mark.requirement("A7")
@mostly_slow("depth", [1, 2], [2])
@seeds(6, 15, 15)
def test_random_losses(depth: int, seeds: Sequence[int]) -> None:
    recoveries = requeued = preempted = hits = accepted = 0
    for seed in seeds:
        stats = random_run(seed, depth, losses=0.03).scheduler.stats()
        recoveries += stats.recoveries
        requeued += stats.requeued
        preempted += stats.preemptions
        hits += stats.prefix_hits
        accepted += sum(stats.drafts_accepted)
    assert min(recoveries, requeued, preempted, hits, accepted) > 0


def test_steps_in_flight_are_forgotten_and_the_order_is_kept() -> None:
    rig = Rig(kv_config(caching=True), depth=2, max_num_seqs=2)
    for number in range(4):
        rig.submit(submit(number, [number + 1] * 9, max_tokens=8, priority=int(number == 0)))
    rig.step()
    rig.plan()
    assert rig.in_flight
    rig.lose()
    with_slot = [s.id for s in rig.scheduler._state.waiting]
    assert with_slot == [1, 2, 3, 0]  # by priority and arrival, as before the loss
    assert rig.scheduler.stats().requeued == 2
    rig.audit()
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    assert rig.most_preempted == 0


def test_a_sequence_fails_after_three_losses_without_a_token() -> None:
    """A sequence fails after three losses in a row without a token. A token resets the count."""
    rig = Rig(kv_config(), depth=1, max_num_seqs=2, max_num_batched_tokens=100)
    for number in (1, 2, 3):
        rig.submit(submit(number, [number] * 9, request=number, max_tokens=30))
    for _ in range(6):  # two losses between tokens are allowed
        rig.lose()
        rig.step()
        rig.lose()
        rig.step()
        rig.step()
    assert not any(output.given_up for output in rig.outputs.values())
    for _ in range(3):
        rig.plan()
        rig.lose()
    assert [output.given_up for output in rig.outputs.values()] == [True, True, False]
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_a_loss_with_nothing_to_do_changes_nothing() -> None:
    rig = Rig(kv_config())
    rig.submit(submit(1, [1, 2, 3], max_tokens=2))
    rig.drain()
    rig.lose()
    assert rig.plan() is None
    rig.check_idle()
    rig.submit(submit(2, [1, 2, 3], max_tokens=2))
    rig.drain()
    rig.check_outputs()


def test_nothing_that_was_cached_is_hit_after_a_loss() -> None:
    rig = Rig(kv_config(caching=True))
    prompt = list(range(1, 21))
    for number, lost in ((1, False), (2, False), (3, True)):
        if lost:
            rig.lose()
        rig.submit(submit(number, prompt, request=number, max_tokens=2))
        rig.drain()
    assert [rig.outputs[n].num_cached for n in (1, 2, 3)] == [0, 16, 0]
    rig.check_outputs()


def test_running_sequences_begin_again_for_new_weights() -> None:
    """Nothing of the old weights is hit, and every sequence goes on with its tokens."""
    rig = Rig(kv_config(caching=True), depth=1, max_num_seqs=2)
    for number in range(3):
        rig.submit(submit(number, [number + 1] * 9, max_tokens=8))
    for _ in range(4):
        rig.step()
    hits = rig.scheduler.stats().prefix_hits
    rig.scheduler.begin_again()
    rig.scheduler.use_weights(b"new")
    assert [one.id for one in rig.scheduler._state.waiting] == [0, 1, 2]
    rig.audit()
    rig.step()
    assert rig.scheduler.stats().prefix_hits == hits
    assert rig.scheduler.stats().preemptions == 2
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
