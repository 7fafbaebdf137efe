"""The cost model: features, prediction, the file, and the fit."""

from __future__ import annotations

import random
import statistics

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.shapes import TRUTH, random_shape, shape
from weft.common.errors import ConfigError
from weft.scheduler.policy.fit import KINDS, LATEST, CostFitter, solve_non_negative
from weft.scheduler.policy.step_cost import (
    KNOTS,
    NAMES,
    PRIOR,
    CostModel,
    StepShape,
    features,
    pairs,
    shape_of,
)
from weft.types.plan import Segment, StepPlan, column


def error_of(model: CostModel, shapes: list[StepShape]) -> float:
    """Median absolute relative error against ``TRUTH``."""
    return statistics.median(abs(model.predict(s) / TRUTH.predict(s) - 1) for s in shapes)


def fitted(
    count: int, *, noise: float = 0.03, outliers: float = 0.0, factor: float = 1.0, seed: int = 1
) -> CostFitter:
    rng, fitter = random.Random(seed), CostFitter()
    for _ in range(count):
        one = random_shape(rng)
        seconds = TRUTH.predict(one) * factor * rng.lognormvariate(0, noise)
        if rng.random() < outliers:
            seconds *= rng.uniform(5, 50)
        fitter.observe(one, seconds)
    fitter.fit()
    return fitter


def test_shape_of_a_plan() -> None:
    prefill = Segment(start=column([0, 10]), count=column([4, 3]), slot=column([0, 1]))
    decode = Segment(start=column([7, 0, 99]), count=column([1, 1, 1]), slot=column([2, 3, 4]))
    found = shape_of(StepPlan(step=0, prefill=prefill, decode=decode))
    assert found == shape([(0, 4), (10, 3)], [7, 0, 99])
    assert found.prefill_pairs == (1 + 2 + 3 + 4) + (11 + 12 + 13)
    assert found.prefill_read == 4 + 13
    assert found.decode_pairs == 8 + 1 + 100
    assert shape_of(StepPlan(step=0)) == StepShape()


def test_shapes_of_long_contexts_do_not_overflow() -> None:
    segment = Segment(start=column([1_000_000] * 4), count=column([8192] * 4), slot=column([0] * 4))
    assert shape_of(StepPlan(step=0, prefill=segment)).prefill_pairs == 4 * pairs(1_000_000, 8192)


@given(st.integers(0, 5000))
def test_slopes_divide_the_tokens(tokens: int) -> None:
    found = features(StepShape(prefill_tokens=tokens))
    slopes = found[1 : 2 + len(KNOTS)]
    assert sum(slopes) == tokens
    assert len(found) == len(NAMES)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 2000)), max_size=4),
    st.lists(st.integers(0, 5000), max_size=40),
    st.integers(0, 5000),
    st.integers(1, 500),
)
def test_more_work_never_costs_less(
    prefill: list[tuple[int, int]], decode: list[int], start: int, count: int
) -> None:
    """The coefficients of a fitted model are never negative."""
    for model in (TRUTH, PRIOR, FITTED):
        before = model.predict(shape(prefill, decode))
        assert model.predict(shape(prefill, [*decode, start])) >= before
        with_chunk = model.predict(shape([*prefill, (start, count)], decode))
        assert with_chunk >= before
        assert model.predict(shape([*prefill, (start, count + 1)], decode)) >= with_chunk


FITTED = fitted(300, noise=0.3, outliers=0.2).model


def test_known_coefficients_are_recovered() -> None:
    model = fitted(1500, noise=0.0).model
    rng = random.Random(9)
    shapes = [random_shape(rng) for _ in range(300)]
    assert error_of(model, shapes) < 0.01
    found = dict(zip(NAMES, model.coefficients, strict=True))
    truth = dict(zip(NAMES, TRUTH.coefficients, strict=True))
    for name in ("step", "tokens_to_256", "tokens_to_1024", "prefill_row", "prefill_pair", "decode_pair"):
        assert found[name] == pytest.approx(truth[name], rel=0.25), name


def test_noise_is_averaged_out() -> None:
    rng = random.Random(9)
    shapes = [random_shape(rng) for _ in range(300)]
    assert error_of(fitted(1500, noise=0.1).model, shapes) < 0.03


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_outliers_are_ignored(seed: int) -> None:
    """A tenth of all steps takes 5 to 50 times too long."""
    rng = random.Random(9)
    shapes = [random_shape(rng) for _ in range(300)]
    assert error_of(fitted(1500, outliers=0.1, seed=seed).model, shapes) < 0.05


def test_few_observations_beat_none_and_set_the_level() -> None:
    """Three decode steps of a machine ten times as slow as the prior's: the prior is scaled."""
    fitter = CostFitter()
    assert fitter.model == PRIOR
    one = shape(decode=[100] * 8)
    for _ in range(3):
        fitter.observe(one, 10 * PRIOR.predict(one))
    prompt = shape([(0, 512)])
    assert fitter.model.predict(one) == pytest.approx(10 * PRIOR.predict(one), rel=0.05)
    assert fitter.model.predict(prompt) == pytest.approx(10 * PRIOR.predict(prompt), rel=0.5)


def test_a_long_time_of_pure_decode_does_not_make_prompts_forgotten() -> None:
    fitter, rng = fitted(400), random.Random(3)
    prompts = [shape([(rng.randrange(1000), rng.randint(1, 600))], [50] * 8) for _ in range(50)]
    before = error_of(fitter.model, prompts)
    for _ in range(3000):
        one = shape(decode=[rng.randrange(500) for _ in range(8)])
        fitter.observe(one, TRUTH.predict(one))
    assert error_of(fitter.model, prompts) < before + 0.03


def test_a_machine_that_gets_slower_is_followed() -> None:
    fitter, rng = fitted(400), random.Random(3)
    for _ in range(1500):
        one = random_shape(rng)
        fitter.observe(one, 2 * TRUTH.predict(one))
    found = [fitter.model.predict(s) / TRUTH.predict(s) for s in (random_shape(rng) for _ in range(50))]
    assert statistics.median(found) == pytest.approx(2, rel=0.1)


def test_unseen_sizes_are_extrapolated_from_their_neighbours() -> None:
    """The fit has chunks of up to 200 tokens. The cost of 2000 tokens follows the slope."""
    fitter, rng = CostFitter(), random.Random(5)
    for _ in range(400):
        one = shape([(0, rng.randint(1, 200))], [100] * rng.randint(0, 16))
        fitter.observe(one, TRUTH.predict(one))
    large = shape([(0, 2000)])
    assert fitter.fit().predict(large) == pytest.approx(TRUTH.predict(large), rel=0.6)


def test_wrong_times_are_not_taken_in() -> None:
    fitter = CostFitter()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        fitter.observe(shape(decode=[1]), seconds)
    assert fitter.observations == 0
    assert fitter.fit() == PRIOR


def test_memory_is_bounded_and_old_kinds_leave() -> None:
    fitter, rng = CostFitter(), random.Random(8)
    for _ in range(4000):
        one = shape(
            [(int(1e6 ** rng.random()), int(1e5 ** rng.random()))],
            [int(1e6 ** rng.random())] * rng.randrange(99),
        )
        fitter.observe(one, TRUTH.predict(one))
    assert len(fitter._rows) == KINDS
    assert fitter._x.shape == (KINDS, LATEST, len(NAMES))
    assert sorted(fitter._rows.values()) == list(range(KINDS))


@settings(deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_solver_meets_its_optimality_conditions(seed: int) -> None:
    """u >= 0, gradient >= 0, and one of the two is 0 in every place."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    a = rng.standard_normal((n + 3, n))
    h, f = a.T @ a + 1e-3 * np.eye(n), rng.standard_normal(n)
    u = solve_non_negative(h, f)
    gradient = h @ u - f
    assert (u >= 0).all()
    assert (gradient >= -1e-8).all()
    assert np.abs(u * gradient).max() < 1e-8


def test_the_file_gives_the_model_back() -> None:
    model = CostModel(FITTED.coefficients, "a machine")
    assert CostModel.from_json(model.to_json()) == model


def broken(**changes: float) -> bytes:
    seconds = {**dict.fromkeys(NAMES, 1e-3), **changes}
    return msgspec.json.encode({"format": 1, "seconds": seconds})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"nonsense", "is not a cost model"),
        (b"{}", "is not a cost model"),
        (b'{"format": 2, "seconds": {}}', "format 2"),
        (broken(extra=1.0), "look at extra"),
        (broken(step=-1.0), "step must be"),
        (msgspec.json.encode({"format": 1, "seconds": dict.fromkeys(NAMES, 0.0)}), "all its coefficients"),
    ],
)
def test_wrong_files_are_refused_with_a_reason(data: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CostModel.from_json(data, "cost.json")
