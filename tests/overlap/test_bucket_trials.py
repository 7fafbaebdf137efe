"""Which form a bucket of decode steps takes, on made-up times of the device."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from tests.overlap.test_split import decode, prompt, segment
from weft.overlap import overlap_policy
from weft.overlap.bucket_trials import FASTER, MOST, SETTLED, TIMES, Bucket, BucketTrial, choose
from weft.overlap.overlap_policy import OverlapPolicy
from weft.overlap.times import StepTimes
from weft.types.plan import PlannedRows, StepPlan

FEW = StepPlan(step=1, decode=segment([decode(i) for i in range(4)]))
MANY = StepPlan(step=1, decode=segment([decode(i) for i in range(16)]))
ONE = StepPlan(step=1, decode=segment([decode(0)]))
NONE = StepPlan(step=1)
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
        if (passed := seconds(forms[-1])) is not None:
            trial.observe(forms[-1], passed)
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


def test_steps_that_are_never_replayed_are_never_in_micro_batches() -> None:
    """For example steps with recorded routes: their times are never known, and two parts cost two passes."""
    trial = BucketTrial()
    assert not any(run(trial, lambda form: None, MOST + 20))
    assert trial.choice == choose((), ())


def test_times_behind_the_end_of_a_trial_change_nothing() -> None:
    trial = BucketTrial()
    run(trial, lambda form: 1.0 if form else 2.0)
    choice = trial.choice
    for form in [True, False] * TIMES:
        trial.observe(form, 1.0 + 100.0 * form)
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


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the log lines of the policy."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(overlap_policy.log, level, lambda text, *args: lines.append(text % args))
    return lines


def test_each_bucket_has_a_choice(logged: list[str]) -> None:
    policy = OverlapPolicy("measured", bucket_of)
    assert set(serve(policy, FEW, (1e-3, 2e-3))[-10:]) == {1}
    assert set(serve(policy, MANY, (2e-3, 1e-3))[-10:]) == {2}
    assert {bucket.rows: choice.micro_batches for bucket, choice in policy.choices.items()} == {
        4: False,
        16: True,
    }
    assert logged == [
        "overlap: decode steps of up to 4 rows (tokens per row: 1, positions: 2048) are computed whole "
        "(medians: 1.000 ms whole, 2.000 ms in micro-batches)",
        "overlap: decode steps of up to 16 rows (tokens per row: 1, positions: 2048) are computed "
        "in micro-batches (medians: 2.000 ms whole, 1.000 ms in micro-batches)",
    ]


@pytest.mark.parametrize("plan", [NONE, ONE, PROMPTS])
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


def begin_trial(policy: OverlapPolicy, plan: StepPlan) -> StepPlan:
    """Serve the whole steps of a trial. Return the first step in micro-batches, launched and not complete."""
    assert set(serve(policy, plan, (2e-3, 1e-3), SETTLED)) == {1}
    assert policy.wants(plan)
    return msgspec.structs.replace(plan, micro_batches=2)


@pytest.mark.requirement("C13")
def test_a_group_that_is_lost_in_a_trial_of_micro_batches_stays_whole(logged: list[str]) -> None:
    """Micro-batches may be the reason of the loss. The loss would come again in every epoch."""
    policy = OverlapPolicy("measured", bucket_of)
    begin_trial(policy, MANY)
    policy.lose()
    assert "--overlap off" in logged[-1]
    for plan in (MANY, FEW):
        assert set(serve(policy, plan, (2e-3, 1e-3))) == {1}
    assert not policy.choices


@pytest.mark.parametrize("chosen", [False, True])
def test_a_group_that_is_lost_for_other_reasons_begins_new_trials(chosen: bool) -> None:
    """Captures end with the epoch, and the ranks of the next epoch may be others."""
    policy = OverlapPolicy("measured", bucket_of)
    if chosen:
        assert serve(policy, MANY, (2e-3, 1e-3))[-1] == 2
        assert policy.wants(MANY), "a step in micro-batches, of a form that has run before, is under way"
    else:
        step = begin_trial(policy, MANY)
        policy.observe(step, StepTimes(micro_batches=2, seconds=1.0))  # captured, so without a time
        assert not policy.wants(MANY)
    policy.lose()
    assert not policy.choices
    forms = serve(policy, MANY, (1e-3, 2e-3))
    assert set(forms[:SETTLED]) == {1}
    assert forms.count(2) == TIMES
    assert forms[-1] == 1
