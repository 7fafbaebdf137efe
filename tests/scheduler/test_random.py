"""Random loads on small pools: each sequence gets the tokens of a run alone, and no block or slot is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.harness import Rig, next_turn, random_bases, random_rig, random_run, random_submits
from tests.support.slow import mostly_slow, seeds


@pytest.mark.requirement("B1", "B4", "B6", "E6")
@seeds((7, 10, 11, 14), 16, 40)
@mostly_slow("depth", [1, 2], [2])
def test_random_loads(depth: int, seeds: Sequence[int]) -> None:
    """The loads of ``test_mutations`` pass without a planted bug."""
    preempted = hits = mixed = errors = accepted = rejected = saved = loaded = 0
    for seed in seeds:
        rig = random_run(seed, depth)
        stats = rig.scheduler.stats()
        preempted += stats.preemptions
        hits += stats.prefix_hits
        mixed += stats.mixed_steps
        errors += stats.row_errors
        accepted += rig.runner.accepted
        saved += rig.runner.saved
        loaded += rig.runner.loaded
        rejected += rig.runner.rejected
        # The scheduler counts only rows that were alive at commit.
        assert sum(stats.drafts_accepted) <= rig.runner.accepted
        assert sum(stats.drafts) <= rig.runner.accepted + rig.runner.rejected
    assert min(preempted, hits, mixed, errors, accepted, rejected, saved, loaded) > 0  # each did happen


@seeds(6, 6, 80)
def test_random_loads_with_an_emptied_prefix_cache(seeds: Sequence[int]) -> None:
    forgotten = hits = saved = 0
    for seed in seeds:
        rig = random_run(seed, 2, forgets=0.1)
        forgotten += rig.scheduler.stats().forgotten_blocks
        hits += rig.scheduler.stats().prefix_hits
        saved += rig.runner.saved
    assert min(forgotten, hits, saved) > 0


class SchedulerMachine(RuleBasedStateMachine):
    """The real scheduler under any order of submits, plans, commits and finishes."""

    @initialize(seed=st.integers(0, 1 << 30), depth=st.sampled_from([1, 2]))
    def start(self, seed: int, depth: int) -> None:
        rng = random.Random(seed)
        self.rig: Rig = random_rig(rng, depth)
        self.bases = random_bases(rng)
        self.requests = 0

    @precondition(lambda self: len(self.rig.outputs) < 30)
    @rule(seed=st.integers(0, 1 << 30), late=st.booleans())
    def submit(self, seed: int, late: bool) -> None:
        rng = random.Random(seed)
        turn = [next_turn(rng, self.rig)] if self.rig.outputs and rng.random() < 0.5 else []
        many = random_submits(rng, len(self.rig.outputs), self.requests, turn or self.bases)
        for number, one in enumerate(many):
            if number and late and self.rig.scheduler.has_work():
                self.rig.step()  # a parallel sample arrives after the first sample was planned
            self.rig.submit(one)
        self.requests += 1

    @precondition(lambda self: bool(self.rig.outputs))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.rig.finish(data.draw(st.integers(0, len(self.rig.outputs) - 1)))

    @precondition(lambda self: len(self.rig.in_flight) < self.rig.depth)
    @rule()
    def plan(self) -> None:
        self.rig.plan()

    @precondition(lambda self: bool(self.rig.in_flight))
    @rule()
    def commit(self) -> None:
        self.rig.commit()

    @rule(steps=st.integers(1, 8))
    def run_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.rig.scheduler.has_work():
                self.rig.step()

    @rule()
    def lose(self) -> None:
        self.rig.lose()

    @invariant()
    def blocks_and_slots_are_somewhere(self) -> None:
        if hasattr(self, "rig"):
            self.rig.audit()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()
            self.rig.check_outputs()
            self.rig.check_idle()


SchedulerMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = pytest.mark.requirement("A6", "B4", "B6")(SchedulerMachine.TestCase)
