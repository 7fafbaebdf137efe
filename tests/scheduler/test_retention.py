"""Cached blocks of sessions are evicted after all other blocks, for a limited time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Rig
from tests.support.slow import mostly_slow, seeds
from weft.kv.pool import BlockPool
from weft.scheduler.policy.retention import SHARE, Retention
from weft.types.plan import StepPlan

SECONDS = 10.0


class Timed(Rig):
    """A rig with a clock set by hand, which retains sessions for ``SECONDS``."""

    def __init__(self, kv: Any, depth: int = 1, seconds: float = SECONDS, **section: Any) -> None:
        super().__init__(kv, depth, **section)
        state = self.scheduler._state
        state.retention = Retention(state.caches, kv.block_size, seconds)
        self.now = 0.0
        build = self.scheduler.build
        self.scheduler.build = lambda now: build(self.now)  # type: ignore[method-assign]

    def plan(self) -> StepPlan | None:
        return super().plan()

    def ask(self, number: int, prompt: list[int], **more: Any) -> int:
        """Run a prompt to the end. Return the number of cached positions."""
        self.submit(submit(number, prompt, **more))
        self.drain()
        return self.outputs[number].num_cached


def others(rig: Timed, first: int, count: int) -> None:
    for number in range(first, first + count):
        rig.ask(number, [number % 50] * 24)


BASE = list(range(20))


def test_a_session_s_blocks_outlive_others() -> None:
    rig = Timed(kv_config(blocks=20, slots=2), max_num_seqs=1)
    rig.ask(0, BASE, session="s")
    rig.ask(1, [*BASE[::-1]])
    others(rig, 10, 6)
    rig.audit()
    assert rig.ask(2, [*BASE, 1]) >= 16
    assert rig.ask(3, BASE[::-1]) == 0
    rig.check_outputs()
    rig.check_idle()


@pytest.mark.requirement("G14")
def test_but_not_for_ever() -> None:
    rig = Timed(kv_config(blocks=20, slots=2), max_num_seqs=1)
    rig.ask(0, BASE, session="s")
    rig.now = SECONDS + 0.1
    others(rig, 10, 6)
    assert rig.ask(2, [*BASE, 1]) == 0
    assert len(rig.scheduler._state.retention) == 0


def test_and_whoever_needs_blocks_gets_them() -> None:
    """All blocks that are not in use are available, retained or not."""
    rig = Timed(kv_config(blocks=13, slots=2), max_num_seqs=2)
    for number in range(3):
        rig.ask(number, [number] * 20, session=f"s{number}")
    assert rig.scheduler.stats().free_blocks == (13,)
    rig.submit(submit(8, [9] * 40))
    rig.submit(submit(9, [8] * 10))
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


@pytest.mark.requirement("G14")
def test_a_later_turn_takes_the_place_of_an_earlier_one() -> None:
    rig = Timed(kv_config(blocks=24, slots=2), max_num_seqs=1)
    rig.ask(0, [*BASE[:8], 40, 41, 42, 43, 44, 45, 46, 47, 48], session="s")
    rig.ask(1, [*BASE, 1], session="s")  # diverges after 8 tokens
    others(rig, 10, 7)
    assert rig.ask(2, [*BASE[:8], 40, 41, 42, 43, 44]) == 8  # the abandoned branch was evicted
    assert rig.ask(3, [*BASE, 2]) == 20


@pytest.mark.requirement("G14")
def test_sessions_together_keep_a_share_and_the_oldest_go_first() -> None:
    rig = Timed(kv_config(blocks=40, slots=2, max_model_len=100), max_num_seqs=1)
    for number in range(6):
        rig.ask(number, [number] * 24, session=f"s{number}", max_tokens=1)
    retention = rig.scheduler._state.retention
    assert retention.blocks <= SHARE * 40
    assert list(retention._sessions) == ["s3", "s4", "s5"]
    rig.ask(
        9, list(range(49)) + list(range(40)), session="long", max_tokens=1
    )  # more than the share: only the beginning is retained
    assert retention.blocks <= SHARE * 40
    assert "long" in retention._sessions


@mostly_slow("depth", [1, 2], [2])
@seeds(3, 8, 8)
def test_random_loads(depth: int, seeds: Sequence[int]) -> None:
    hits = {0.0: 0, SECONDS: 0}
    for seed in seeds:
        for seconds in hits:
            rng = random.Random(seed)
            kv = kv_config(
                blocks=rng.choice([14, 60]),
                slots=4 * depth,
                states=rng.choice([0, 5]),
                window=rng.choice([None, 6]),
                ratio=rng.choice([0, 2]),
            )
            rig = Timed(kv, depth, seconds, max_num_seqs=4)
            for number in range(60):
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
                session = rng.choice(["", "a", "b", "c"])
                rig.submit(submit(number, prompt, session=session, max_tokens=rng.randint(1, 6)))
                for _ in range(rng.randint(0, 4)):
                    rig.step()
                    rig.audit()
                rig.now += rng.random() * 4
                if rng.random() < 0.1:
                    rig.finish(rng.randrange(number + 1))
                if rng.random() < 0.03:
                    rig.lose()
            rig.drain()
            rig.check_outputs()
            rig.check_idle()
            hits[seconds] += rig.scheduler.stats().prefix_hits
    assert min(hits.values()) > 0


def test_the_pool_evicts_what_is_kept_last() -> None:
    pool = BlockPool(4)
    keys = [bytes([n]) for n in range(4)]
    blocks = [pool.take() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.insert(block, key)
    pool.retain(keys[0])
    pool.retain(keys[1])
    pool.retain(keys[1])
    for block in blocks:
        pool.release(block, -1)
    assert pool.available() == 4
    pool.retain(keys[2])
    pool.end_retention(keys[2])
    pool.end_retention(keys[1])
    assert [pool.take() for _ in range(4)] == [blocks[2], blocks[3], blocks[0], blocks[1]]
    pool.insert(blocks[1], keys[1])  # the content is still retained
    pool.insert(blocks[3], keys[3])
    pool.release(blocks[1], -1)
    pool.release(blocks[3], -1)
    assert [pool.take(), pool.take()] == [blocks[3], blocks[1]]
    pool.end_retention(keys[0])
    pool.end_retention(keys[1])
    assert pool._retains == {}


def test_blocks_cached_again_are_retained_per_session() -> None:
    """The end of one session does not release blocks that another session has computed again."""
    rig = Timed(kv_config(blocks=12, slots=2), max_num_seqs=1)
    rig.ask(0, BASE, session="a")
    rig.ask(1, [9] * 47, max_tokens=1)  # takes all blocks, retained or not
    rig.now = SECONDS / 2
    rig.ask(2, BASE, session="b")
    assert rig.outputs[2].num_cached == 0
    rig.now = SECONDS + 0.1  # session a has ended, session b has not
    others(rig, 10, 7)
    assert list(rig.scheduler._state.retention._sessions) == ["b"]
    assert rig.ask(30, [*BASE, 1]) >= 16


def test_a_session_that_ends_takes_no_snapshot_from_another() -> None:
    """Two sessions share a beginning. Each retains only its last snapshot, and releases only this
    snapshot."""
    rig = Timed(kv_config(blocks=100, slots=2, states=6, stride=4, max_model_len=100), max_num_seqs=1)
    rig.ask(0, [*BASE, *BASE, 1], session="long")
    rig.now = SECONDS / 2
    rig.ask(1, [*BASE, 1], session="short", max_tokens=1)
    had = rig.ask(2, [*BASE, 1])
    assert had == 20
    rig.now = SECONDS + 0.1
    rig.ask(3, [7] * 24)
    assert list(rig.scheduler._state.retention._sessions) == ["short"]
    others(rig, 10, 7)
    assert rig.ask(30, [*BASE, 1]) == had
