"""The chunk policy alone, and inside the scheduler."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Rig
from tests.sim.shapes import TRUTH, shape
from weft.common.errors import ConfigError
from weft.scheduler.policy.chunk import FLOOR_TOKENS, ChunkPolicy
from weft.scheduler.policy.fit import CostFitter
from weft.scheduler.policy.step_cost import NAMES, CostModel


def policy(target: float) -> ChunkPolicy:
    return ChunkPolicy(target, CostFitter(TRUTH))


def fill(chunks: ChunkPolicy, decode: list[int], waiting: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Offer (start, known tokens left) in order. Return the rows of the chunk policy."""
    chunks.begin(shape(decode=decode))
    made = []
    for start, left in waiting:
        count = chunks.room(start, left)
        assert 0 <= count <= left
        if count:
            chunks.took(start, count)
            made.append((start, count))
    return made


lengths = st.tuples(st.integers(0, 4000), st.integers(1, 3000))


@pytest.mark.requirement("B7")
@given(
    st.floats(1e-4, 0.5),
    st.lists(st.integers(0, 4000), min_size=1, max_size=64),
    st.lists(lengths, min_size=1, max_size=8),
)
def test_chunks_respect_the_target_and_never_starve(
    target: float, decode: list[int], waiting: list[tuple[int, int]]
) -> None:
    made = fill(policy(target), decode, waiting)
    total = sum(count for _, count in made)
    assert total >= min(FLOOR_TOKENS, sum(left for _, left in waiting))
    if total > FLOOR_TOKENS:
        assert TRUTH.predict(shape(made, decode)) <= target
    # The longest possible chunk: one more token would exceed the target.
    if total < sum(left for _, left in waiting):
        start, count = made[-1]
        longer = [*made[:-1], (start, count + 1)]
        nothing_cut = count == waiting[len(made) - 1][1]
        if nothing_cut:  # the next one got nothing at all
            start, _ = waiting[len(made)]
            longer = [*made, (start, 1)]
        assert TRUTH.predict(shape(longer, decode)) > target


@given(st.floats(1e-4, 0.5), st.lists(lengths, min_size=1, max_size=8))
def test_without_decode_rows_there_is_no_limit(target: float, waiting: list[tuple[int, int]]) -> None:
    assert fill(policy(target), [], waiting) == waiting


@given(st.floats(1e-4, 0.5), st.lists(st.integers(0, 4000), min_size=1), st.lists(lengths, min_size=2))
def test_first_come_first_served(target: float, decode: list[int], waiting: list[tuple[int, int]]) -> None:
    """The rows are a prefix of the waiting rows. Only the last row's chunk is cut."""
    made = fill(policy(target), decode, waiting)
    assert made[:-1] == waiting[: len(made) - 1]
    assert made[-1][0] == waiting[len(made) - 1][0]


def test_a_younger_short_context_does_not_take_what_an_older_long_one_could_not() -> None:
    """Only attention costs time: a token at position 4000 costs as much as many early tokens."""
    pairs_only = CostModel.of({**dict.fromkeys(NAMES, 0.0), "prefill_pair": 1e-6})
    chunks = ChunkPolicy(0.0999, CostFitter(pairs_only))
    made = fill(chunks, [10], [(4000, 500), (0, 500)])
    assert made == [(4000, 24)]


def test_a_row_that_was_offered_and_not_made_changes_nothing() -> None:
    chunks = policy(0.03)
    chunks.begin(shape(decode=[100] * 8))
    first = chunks.room(0, 3000)
    assert FLOOR_TOKENS < first < 3000
    assert chunks.room(0, 3000) == first
    chunks.took(0, first)
    assert chunks.room(0, 3000) == 0


def test_it_learns_what_the_machine_takes() -> None:
    """The policy moves from the prior to within a tenth of the target by its own steps alone."""
    chunks, rng = ChunkPolicy(0.05), random.Random(4)
    late = []
    for turn in range(200):
        decode = [rng.randrange(600) for _ in range(32)]
        made = fill(chunks, decode, [(rng.randrange(1500), 1500)])
        one = shape(made, decode)
        chunks._fitter.observe(one, TRUTH.predict(one) * rng.lognormvariate(0, 0.05))
        if turn >= 50:
            late.append(TRUTH.predict(one) / 0.05)
    assert max(late) < 1.15
    assert sorted(late)[len(late) // 2] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_scheduler_takes_the_floor_and_all_tokens_are_right(depth: int) -> None:
    """No step meets the target. Prompts still finish with the minimum chunk, and sample the right tokens."""
    rig = Rig(kv_config(blocks=200), depth, max_num_batched_tokens=64, itl_target_ms=0.001)
    rig.submit(submit(0, [1] * 4, max_tokens=40))
    rig.step()
    rig.step()
    for number in range(1, 5):
        rig.submit(submit(number, [number] * 40, max_tokens=2))
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    mixed = [plan for plan in rig.plans if plan.decode.rows and plan.prefill.rows]
    assert mixed
    assert {plan.prefill.tokens for plan in mixed[:-1]} == {FLOOR_TOKENS}


def test_a_target_that_everything_meets_changes_no_plan() -> None:
    plans = []
    for target in (0.0, 1e6):
        rig = Rig(kv_config(blocks=200), 2, max_num_batched_tokens=24, itl_target_ms=target)
        for number in range(12):
            rig.submit(submit(number, [number] * (10 + number), max_tokens=5))
        rig.drain()
        rig.check_outputs()
        plans.append([(p.prefill.count.tolist(), p.decode.start.tolist()) for p in rig.plans])
    assert plans[0] == plans[1]


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_under_random_targets(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(
        kv_config(blocks=rng.choice([14, 40]), window=rng.choice([None, 6])),
        rng.choice([1, 2]),
        max_num_batched_tokens=rng.choice([16, 48]),
        itl_target_ms=rng.choice([0.5, 6.0, 8.0]),
    )
    for number in range(30):
        rig.submit(submit(number, [rng.randrange(50)] * rng.randint(1, 40), max_tokens=rng.randint(1, 8)))
        for _ in range(rng.randrange(3)):
            rig.step()
            if rig.plans:
                rig.scheduler.observe(rig.plans[-1], rng.uniform(0.001, 0.02))
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_exclusive_steps_have_no_target() -> None:
    with pytest.raises(ConfigError, match=r"--itl-target-ms.*--step-policy"):
        Rig(kv_config(), 1, step_policy="exclusive", itl_target_ms=5.0)


def test_no_row_passes_a_row_that_did_not_fit() -> None:
    decode, first, long, short = [500] * 8, (0, FLOOR_TOKENS), (10_000_000, 500), (0, 500)
    target = TRUTH.predict(shape([first, (0, 100)], decode))
    assert fill(policy(target), decode, [first, short]) == [first, (0, 100)]
    assert fill(policy(target), decode, [first, long, short]) == [first]
