"""Which steps run in micro-batches, on made-up times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec
import pytest

from tests.overlap.test_split import decode, prompt, segment
from weft.config.sections.all import ParallelSection
from weft.overlap.overlap_policy import FEW, LATEST, OTHER_EVERY, OverlapPolicy, mode_of
from weft.overlap.split import split
from weft.overlap.times import StepTimes, Stretch, covered
from weft.parallel.launcher import Flight
from weft.types.plan import StepPlan

PROMPTS = StepPlan(step=1, prefill=segment([prompt(0, 256), prompt(1, 256)]))
DECODES = StepPlan(step=1, decode=segment([decode(i) for i in range(16)]))
ONE = StepPlan(step=1, decode=segment([decode(0)]))
IDLE = StepPlan(step=1)


@pytest.mark.requirement("C12")
@pytest.mark.parametrize(
    ("parallel", "mode"),
    [
        (None, "off"),
        (ParallelSection(), "off"),
        (ParallelSection(overlap="all"), "off"),
        (ParallelSection(overlap="all", data_parallel_size=4), "off"),
        (ParallelSection(overlap="all", tensor_parallel_size=2), "all"),
        (ParallelSection(tensor_parallel_size=2), "auto"),
        (ParallelSection(tensor_parallel_size=2, overlap="off"), "off"),
        (ParallelSection(overlap="prefill", data_parallel_size=2, enable_expert_parallel=True), "prefill"),
    ],
)
def test_asking_before_or_without_ranks_answers_off(parallel: ParallelSection | None, mode: str) -> None:
    assert mode_of(parallel) == mode
    assert mode_of(parallel, "cuda") == ("measured" if mode == "auto" else mode)
    assert OverlapPolicy().mode == "off"
    assert not OverlapPolicy().wants(PROMPTS)


@pytest.mark.requirement("C12")
@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_that_share_experts_on_gpus_answer_off(ranks: int) -> None:
    """Their steps in micro-batches are not captured."""
    parallel = ParallelSection(tensor_parallel_size=ranks, data_parallel_size=2, enable_expert_parallel=True)
    assert mode_of(parallel) == "auto"
    assert mode_of(parallel, "cuda") == "off"


@pytest.mark.requirement("C2")
@pytest.mark.parametrize(
    ("mode", "wanted"), [("off", []), ("prefill", [PROMPTS, IDLE]), ("all", [PROMPTS, DECODES, IDLE])]
)
def test_modes(mode: str, wanted: list[StepPlan]) -> None:
    policy = OverlapPolicy(mode)
    for plan in (PROMPTS, DECODES, ONE, IDLE):
        assert policy.wants(plan) == any(plan is one for one in wanted)


def decide(policy: OverlapPolicy, plan: StepPlan) -> StepPlan:
    return msgspec.structs.replace(plan, micro_batches=1 + policy.wants(plan))


def times(plan: StepPlan, compute: float, link: float, waited: float) -> StepTimes:
    """Return the times of a step that computed and waited for the given seconds."""
    flight = Flight(0, 0.0, 0.0, link, waited)
    seconds = compute + waited
    return StepTimes(
        micro_batches=plan.micro_batches,
        seconds=seconds,
        stretches=[Stretch(0, 0.0, seconds)],
        flights=[flight],
    )


class Machine:
    """Step times: compute by tokens, ``toll`` extra in micro-batches, and a link of ``link`` seconds."""

    def __init__(
        self, fixed: float, token: float, link: float, toll: float = 0.0, noise: float = 0.0
    ) -> None:
        self.fixed, self.token, self.link, self.toll, self.noise = fixed, token, link, toll, noise
        self._random = random.Random(3)

    def run(self, plan: StepPlan) -> StepTimes:
        shake = 1.0 + self.noise * self._random.uniform(-1.0, 1.0)
        if plan.micro_batches == 1:
            return times(plan, shake * self.compute(plan), self.link, self.link)
        micro_batches = split(plan)
        assert micro_batches is not None
        parts = [self.compute(micro_batch) * (1 + self.toll) for micro_batch in micro_batches[:2]]
        took = max(sum(parts), max(parts) + self.link)
        return times(plan, shake * sum(parts), self.link, took - sum(parts))

    def compute(self, plan: StepPlan) -> float:
        return self.fixed + self.token * plan.tokens


def many(policy: OverlapPolicy, plan: StepPlan, machine: Machine, steps: int) -> tuple[int, float]:
    """(steps in micro-batches, seconds of all)."""
    overlapped, seconds = 0, 0.0
    for _ in range(steps):
        decided = decide(policy, plan)
        made = machine.run(decided)
        policy.observe(decided, made)
        overlapped += decided.micro_batches > 1
        seconds += made.seconds
    return overlapped, seconds


@pytest.mark.requirement("C9")
def test_auto_takes_micro_batches_where_they_hide_communication() -> None:
    overlapped, _ = many(OverlapPolicy("auto"), PROMPTS, Machine(1e-3, 1e-4, 20e-3), 400)
    assert overlapped > 350


@pytest.mark.requirement("C9")
def test_auto_stays_whole_where_there_is_nothing_to_hide() -> None:
    overlapped, _ = many(OverlapPolicy("auto"), PROMPTS, Machine(1e-3, 1e-4, 1e-4), 400)
    assert overlapped == 0


@pytest.mark.requirement("C9")
def test_auto_stays_whole_where_micro_batches_read_all_weights_twice() -> None:
    """A decode step of few rows is all fixed cost: two micro-batches are two steps."""
    overlapped, _ = many(OverlapPolicy("auto"), DECODES, Machine(10e-3, 1e-6, 8e-3), 400)
    assert overlapped == 0


@pytest.mark.requirement("C9")
def test_auto_gives_up_what_does_not_pay_after_all() -> None:
    """The model predicts a gain, but threads take cores from each other."""
    machine = Machine(1e-3, 1e-4, 20e-3, toll=1.0)
    overlapped, seconds = many(OverlapPolicy("auto"), PROMPTS, machine, 3000)
    assert overlapped == FEW + 3000 // OTHER_EVERY
    off = 3000 * machine.run(PROMPTS).seconds
    assert seconds <= 1.02 * off


@pytest.mark.requirement("C9")
def test_auto_changes_its_mind_with_the_link() -> None:
    policy, machine = OverlapPolicy("auto"), Machine(1e-3, 1e-4, 20e-3)
    assert many(policy, PROMPTS, machine, 200)[0] > 150
    machine.link = 1e-5
    many(policy, PROMPTS, machine, LATEST * OTHER_EVERY)
    assert many(policy, PROMPTS, machine, 200)[0] < 20
    machine.link = 20e-3
    many(policy, PROMPTS, machine, LATEST * OTHER_EVERY)
    assert many(policy, PROMPTS, machine, 200)[0] > 150


@pytest.mark.requirement("C9")
@pytest.mark.parametrize("link", [1e-4, 2e-3, 2e-2])
@pytest.mark.parametrize("toll", [0.0, 0.3])
@pytest.mark.parametrize("plan", [PROMPTS, DECODES], ids=["prompts", "decodes"])
def test_auto_is_never_much_slower_than_off(link: float, toll: float, plan: StepPlan) -> None:
    """C9's bar on made-up machines with 10% of noise, trials included."""
    seconds: Callable[[str], float] = lambda mode: many(  # noqa: E731
        OverlapPolicy(mode), plan, Machine(5e-3, 5e-5, link, toll, noise=0.1), 1000
    )[1]
    off, auto = seconds("off"), seconds("auto")
    assert auto <= 1.02 * off


@pytest.mark.requirement("C9")
def test_decisions_do_not_flutter() -> None:
    """The gain is near the border. Noise of 10% changes the form in few steps."""
    policy = OverlapPolicy("auto")
    machine = Machine(1e-3, 1e-4, 2e-3, noise=0.1)
    decided = []
    for _ in range(2000):
        plan = decide(policy, PROMPTS)
        policy.observe(plan, machine.run(plan))
        decided.append(plan.micro_batches)
    assert sum(a != b for a, b in itertools.pairwise(decided)) < 200


@pytest.mark.requirement("C9")
@pytest.mark.parametrize(("toll", "faster"), [(0.0, 2), (1.0, 1)])
def test_the_slower_form_is_measured_now_and_then(toll: float, faster: int) -> None:
    policy, machine = OverlapPolicy("auto"), Machine(1e-3, 1e-4, 20e-3, toll)
    many(policy, PROMPTS, machine, 2 * FEW)
    decided = []
    for _ in range(10 * OTHER_EVERY):
        plan = decide(policy, PROMPTS)
        policy.observe(plan, machine.run(plan))
        decided.append(plan.micro_batches)
    assert decided.count(3 - faster) == 10


@pytest.mark.requirement("C9")
def test_steps_of_unlike_size_decide_apart() -> None:
    """Long prompts gain. Short prompts have too little compute to hide communication."""
    policy, machine = OverlapPolicy("auto"), Machine(10e-3, 1e-4, 40e-3)
    short = StepPlan(step=1, prefill=segment([prompt(0, 8), prompt(1, 8)]))
    assert many(policy, PROMPTS, machine, 100)[0] > 80
    assert many(policy, short, machine, 100)[0] <= FEW + 100 // OTHER_EVERY


@pytest.mark.requirement("C9")
def test_a_replica_that_may_not_split_counts_as_whole() -> None:
    """The expert-parallel group decided otherwise: a step that ran whole is learned as whole."""
    policy, machine = OverlapPolicy("auto"), Machine(1e-3, 1e-4, 20e-3)
    for _ in range(50):
        policy.wants(PROMPTS)
        policy.observe(PROMPTS, machine.run(PROMPTS))
    assert policy.steps == 0


def test_time_under_way_counts_once() -> None:
    assert covered([]) == 0.0
    assert covered([(0.0, 1.0), (2.0, 3.0)]) == 2.0
    assert covered([(2.0, 5.0), (0.0, 3.0), (4.0, 4.5)]) == 5.0
    flights = [Flight(0, 0.0, 0.0, 4.0, 1.0), Flight(1, 1.0, 1.0, 5.0, 0.5)]
    made = StepTimes(micro_batches=2, seconds=6.0, flights=flights)
    assert (made.communication, made.waited, made.hidden, made.compute) == (5.0, 1.5, 3.5, 4.5)
