"""Which form a bucket of decode steps takes, on made-up times of the device."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import msgspec
import pytest

from tests.overlap.test_split import decode, prompt, segment
from weft.overlap.bucket_trials import FASTER, MOST, SETTLED, TIMES, Bucket, BucketTrial, choose
from weft.overlap.overlap_policy import OverlapPolicy
from weft.overlap.times import StepTimes
from weft.types.plan import PlannedRows, StepPlan

FEW = StepPlan(step=1, decode=segment([decode(i) for i in range(4)]))
MANY = StepPlan(step=1, decode=segment([decode(i) for i in range(16)]))
ONE = StepPlan(step=1, decode=segment([decode(0)]))
PROMPTS = StepPlan(step=1, prefill=segment([prompt(0, 256), prompt(1, 256)]))


@pytest.mark.parametrize(
    ("whole", "micro_batches", "chosen"),
    [
        ([1.0] * TIMES, [0.9] * TIMES, True),
        ([1.0] * TIMES, [1.1] * TIMES, False),
        ([1.0] * TIMES, [FASTER] * TIMES, False),
        ([1.0] * TIMES, [FASTER - 0.001] * TIMES, True),
        ([1.0] * 7 + [50.0], [1.1] * TIMES, False),
        ([1.0] * TIMES, [0.9] * 7 + [50.0], True),
        ([1.0] * TIMES, [], False),
        ([], [], False),
    ],
)
def test_the_faster_form_is_chosen_by_medians(
    whole: list[float], micro_batches: list[float], chosen: bool
) -> None:
    assert choose(whole, micro_batches).micro_batches == chosen


def run(trial: BucketTrial, seconds: Callable[[bool], float | None], steps: int = MOST) -> list[bool]:
    """Return the form of each step: True for micro-batches."""
    forms = []
    for _ in range(steps):
        forms.append(trial.next())
        trial.observe(forms[-1], seconds(forms[-1]))
    return forms


def test_the_forms_alternate_after_whole_steps_until_both_have_their_times() -> None:
    for micro_batch_seconds in (1.0, 3.0):
        trial = BucketTrial()
        forms = run(trial, lambda form, two=micro_batch_seconds: two if form else 2.0)  # type: ignore[misc]
        assert forms[: SETTLED + 2 * TIMES - 1] == [False] * SETTLED + ([True, False] * TIMES)[:-1]
        assert set(forms[SETTLED + 2 * TIMES - 1 :]) == {micro_batch_seconds < 2.0}
        assert trial.choice == choose([2.0], [micro_batch_seconds])


@pytest.mark.parametrize("slower", [1.0, 1.02, 1.1, 2.0])
def test_noise_does_not_choose_the_slower_form(slower: float) -> None:
    """With 5% of noise, a form that is slower by 2% or more is never taken for the faster one."""
    draw, wrong = random.Random(3), 0
    for _ in range(300):
        trial = BucketTrial()
        run(trial, lambda form: (slower if form else 1.0) * draw.uniform(0.95, 1.05))
        assert trial.choice is not None
        wrong += trial.choice.micro_batches
    assert wrong <= (30 if slower == 1.0 else 3 if slower == 1.02 else 0)


def test_a_bucket_without_times_stays_whole() -> None:
    """Steps without a time are bounded: for example, another rank fails in each epoch before the times."""
    trial = BucketTrial()
    forms = run(trial, lambda form: None if form else 1.0, MOST + 20)
    assert sum(forms) == (MOST - SETTLED) // 2
    assert not any(forms[MOST:])
    assert trial.choice is not None
    assert not trial.choice.micro_batches


def test_times_behind_the_end_of_a_trial_change_nothing() -> None:
    trial = BucketTrial()
    run(trial, lambda form: 1.0 if form else 2.0)
    choice = trial.choice
    assert not any(trial.observe(form, 100.0 * form) for form in (True, False) for _ in range(TIMES))
    assert trial.choice is choice


def bucket_of(plan: PlannedRows) -> Bucket | None:
    return Bucket(plan.decode.rows, 1, 2048) if plan.decode.rows < 32 else None


def serve(policy: OverlapPolicy, plan: StepPlan, times: tuple[float, float], steps: int = 60) -> list[int]:
    """Return the number of micro-batches of each step. ``times``: whole, in micro-batches."""
    made = []
    for _ in range(steps):
        decided = msgspec.structs.replace(plan, micro_batches=1 + policy.wants(plan))
        device = times[decided.micro_batches - 1]
        policy.observe(decided, StepTimes(micro_batches=decided.micro_batches, seconds=1.0, device=device))
        made.append(decided.micro_batches)
    return made


def test_each_bucket_has_a_choice(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    policy = OverlapPolicy("measured", bucket_of)
    with caplog.at_level(logging.INFO, "weft"):
        assert set(serve(policy, FEW, (1e-3, 2e-3))[-10:]) == {1}
        assert set(serve(policy, MANY, (2e-3, 1e-3))[-10:]) == {2}
    assert {bucket.rows: choice.micro_batches for bucket, choice in policy.choices.items()} == {
        4: False,
        16: True,
    }
    assert [record.getMessage() for record in caplog.records] == [
        "overlap: decode steps of up to 4 rows of 1 tokens, 2048 positions are computed whole "
        "(medians: 1.000 ms whole, 2.000 ms in micro-batches)",
        "overlap: decode steps of up to 16 rows of 1 tokens, 2048 positions are computed in micro-batches "
        "(medians: 2.000 ms whole, 1.000 ms in micro-batches)",
    ]


@pytest.mark.parametrize("plan", [ONE, PROMPTS])
def test_steps_that_cannot_be_captured_in_both_forms_stay_whole(plan: StepPlan) -> None:
    policy = OverlapPolicy("measured", bucket_of)
    assert set(serve(policy, plan, (2e-3, 1e-3))) == {1}
    assert not policy.choices


def test_a_failed_capture_makes_a_chosen_bucket_whole() -> None:
    captured = True
    policy = OverlapPolicy("measured", lambda plan: bucket_of(plan) if captured else None)
    assert serve(policy, MANY, (2e-3, 1e-3))[-1] == 2
    captured = False
    assert set(serve(policy, MANY, (2e-3, 1e-3))) == {1}
