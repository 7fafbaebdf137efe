"""Exact tokens with speculation: in float64 no drafter, number of drafts or absence of drafts changes a
token.

The reference of every sequence is a run alone without speculation. Each comparison must have accepted and
rejected drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e0.margins import MARGIN, guesses, smallest_margin
from tests.e0.rig import Answer, make_engine, replaying, run, submit
from tests.e0.test_grid import FILLER, PROMPTS, small
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.oracle import Oracle
from tests.support.pairwise import covering, each_value, name
from weft.config.sections.all import SpeculationSection
from weft.runner import drafting
from weft.runner.graphs import graphs
from weft.scheduler.policy.draft_policy import DraftPolicy
from weft.scheduler.scheduler import Scheduler
from weft.speculation.mtp import MtpDrafter
from weft.types.messages import Submit
from weft.types.plan import AllocSlot
from weft.types.sampling import TokenParams

OUTPUT = 16
SAMPLING = {
    "greedy": TokenParams(temperature=0.0, max_tokens=OUTPUT),
    "seeded": TokenParams(
        temperature=0.9,
        top_k=14,
        top_p=0.93,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        max_tokens=OUTPUT,
    ),
    "listed": TokenParams(
        temperature=0.7,
        logit_bias=((3, 4.0), (9, 3.0), (11, -50.0)),
        bad=((17,), (3, 3), (9, 3, 9)),
        stop_ids=(1, 5, 20, 33),
        min_tokens=6,
        repetition_penalty=1.05,
        logprobs=2,
        prompt_logprobs=1,
        max_tokens=OUTPUT,
    ),
}
FEATURES: dict[str, list[Any]] = {
    "model": ["qwen3_moe", "qwen2_windowed", "qwen3_next"],
    "drafter": ["oracle", "ngram"],
    "drafts": [1, 2, 3, 4, 8],
    "number": ["most", "whim"],
    "depth": [1, 2],
    "policy": ["mixed", "exclusive"],
    "chunk": [0, 7],
    "prefix": ["hit", "miss"],
    "preempt": [False, True],
    "n": [1, 2],
    "sampling": list(SAMPLING),
    "replayed": [False, True],
}
CHEAP = {"n": 1}
COVER = covering(FEATURES, cheap=CHEAP)
MTP_FEATURES = {**FEATURES, "model": ["deepseek_mtp"], "drafter": ["mtp"]}
BATCH = 6


class Reference:
    """Answers of (model, sampling, prompt, choice) alone, computed once, as in ``test_grid`` without
    lists."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self._guesses: dict[tuple[str, str], dict[tuple[int, int], Answer]] = {}
        self._answers: dict[tuple[str, str, int, int], Answer] = {}

    def folder(self, model: str) -> Path:
        if model not in self._folders:
            mtp = model == "deepseek_mtp"
            self._folders[model] = (
                make_mtp_checkpoint(self._root / model, skilled=True)
                if mtp
                else make_checkpoint(self._root, model)
            )
        return self._folders[model]

    def answer(self, model: str, sampling: str, prompt: int, choice: int) -> Answer:
        key = (model, sampling, prompt, choice)
        if key not in self._answers:
            params, folder = SAMPLING[sampling], self.folder(model)
            one = submit(1, PROMPTS[prompt], params, request=prompt, choice=choice)
            if sampling != "listed":
                if (model, sampling) not in self._guesses:
                    self._guesses[model, sampling] = guesses(folder, PROMPTS[:BATCH], params, 2)
                answer = self._guesses[model, sampling][prompt, choice]
                assert smallest_margin(folder, one, answer.tokens) > MARGIN, f"the fixture has a tie: {key}"
            else:  # margins do not cover lists
                engine, _ = make_engine(folder, caching=False, max_num_seqs=1)
                answer = run(engine, [[one]])[1]
            self._answers[key] = answer
        return self._answers[key]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("speculation"))


def plan_submits(case: dict[str, Any]) -> tuple[list[list[Submit]], dict[int, tuple[int, int]]]:
    """Return (sequences to submit before each step, sequence -> (prompt, choice)). Arrivals are spread
    out."""
    params, arrivals, who = SAMPLING[case["sampling"]], [], {}
    for prompt in range(BATCH):
        group = []
        for choice in range(case["n"]):
            sequence = 100 * prompt + choice + 1
            who[sequence] = (prompt, choice)
            group.append(submit(sequence, PROMPTS[prompt], params, request=prompt, choice=choice))
        arrivals.append(group)
    if case["preempt"]:
        filler = TokenParams(temperature=0.0, max_tokens=8 * small(case) - 32)
        arrivals[0].append(submit(9999, FILLER, filler, request=9999, priority=-1))
    return arrivals, who


def oracle(case: dict[str, Any], reference: Reference) -> Oracle:
    """Return an oracle with about every second draft correct. The oracle does not know the filler."""

    def answer(op: AllocSlot) -> list[int]:
        prompt = op.seed - 1000
        if prompt >= BATCH:
            return []
        known = reference.answer(case["model"], case["sampling"], prompt, op.choice)
        return PROMPTS[prompt] + known.tokens

    return Oracle(answer, 0.6, VOCAB)


class Whim(DraftPolicy):
    """Random numbers of drafts, sometimes none: a policy as measured times may produce."""

    def __init__(self, most: int, scheduler: Scheduler) -> None:
        super().__init__(most, False, scheduler._state.columns)
        self._whim = np.random.default_rng(3)

    def idle(self) -> bool:
        return bool(self._whim.random() < 0.15)

    def choose(self, slots: np.ndarray, starts: np.ndarray, room: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = np.minimum(room, self._whim.integers(0, self.most + 1, len(slots)))
        return (chosen * (self._whim.random() < 0.8)).astype(np.int32)

    def first(self, room: int) -> int:
        return min(room, int(self._whim.integers(0, self.most + 1)))


@pytest.fixture(autouse=True)
def _capture_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "WORTH_CAPTURING", 1)
    monkeypatch.setattr(drafting, "WORTH_CAPTURING", 1)


def check_same(answer: Answer, expected: Answer, what: str) -> None:
    assert answer.tokens == expected.tokens, what
    assert (answer.ends, answer.stop_id) == (expected.ends, expected.stop_id), what
    for got, wanted in (
        (answer.logprobs, expected.logprobs),
        (answer.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert [(ids, rank) for ids, _, rank in got] == [(ids, rank) for ids, _, rank in wanted], what
        np.testing.assert_allclose([v for _, v, _ in got], [v for _, v, _ in wanted], rtol=1e-6)


@pytest.mark.requirement("B10")
@pytest.mark.parametrize("case", each_value(COVER), ids=name)
def test_pairwise_cover(case: dict[str, Any], reference: Reference) -> None:
    check(case, reference)


@pytest.mark.requirement("B10")
@pytest.mark.parametrize("case", each_value(covering(MTP_FEATURES, cheap=CHEAP)), ids=name)
def test_pairwise_cover_of_the_models_own_drafts(case: dict[str, Any], reference: Reference) -> None:
    check(case, reference)


def check(case: dict[str, Any], reference: Reference) -> None:
    hit = case["prefix"] == "hit"
    speculation = SpeculationSection(
        speculative_method="mtp" if case["drafter"] == "mtp" else "ngram",
        num_speculative_tokens=case["drafts"],
        speculative_adaptive=False,
        ngram_min_length=1,
    )
    knows = oracle(case, reference) if case["drafter"] == "oracle" else None
    for prompt in range(BATCH):  # computed before the engine runs
        for choice in range(case["n"]):
            reference.answer(case["model"], case["sampling"], prompt, choice)
    engine, runner = make_engine(
        reference.folder(case["model"]),
        blocks=small(case) + 2 if case["preempt"] else 512,  # with space for drafts
        max_len=8 * small(case),
        chunk=case["chunk"],
        depth=case["depth"],
        policy=case["policy"],
        caching=hit,
        max_num_seqs=48,
        speculation=speculation,
        drafter=knows,
        graphs=replaying(case["drafts"]) if case["replayed"] else None,
    )
    if case["number"] == "whim":
        engine.scheduler.planner.drafts = Whim(engine.runner.kv.drafts, engine.scheduler)
    try:
        if hit:
            known = [*PROMPTS[:BATCH], FILLER]
            once = TokenParams(max_tokens=1)
            run(engine, [[submit(5000 + i, ids, once, request=5000 + i) for i, ids in enumerate(known)]])
        warmed = engine.stats()
        arrivals, who = plan_submits(case)
        answers = run(engine, arrivals)
        stats = engine.stats()
    finally:
        engine.close()
    for sequence, (prompt, choice) in who.items():
        expected = reference.answer(case["model"], case["sampling"], prompt, choice)
        if hit:  # prompt logprobs skip the cache
            assert answers[sequence].tokens == expected.tokens
        if choice:  # prompt logprobs are for choice 0
            answers[sequence].prompt_logprobs = list(expected.prompt_logprobs)
        check_same(answers[sequence], expected, f"prompt {prompt}, choice {choice}")
    # The features were active.
    if case["replayed"]:
        assert runner.graphs is not None
        assert runner.graphs.replayed > 0
        if case["number"] == "most":
            assert any(key[1] > 1 for key in runner.graphs._replays)
    if case["replayed"] and case["drafter"] == "mtp":
        assert isinstance(runner.drafter, MtpDrafter)
        assert runner.drafter.captured is not None
        assert runner.drafter.captured.replayed > 0 or case["number"] == "whim"
    assert sum(stats.drafts) > sum(stats.drafts_accepted)
    # The output of this random model never repeats.
    assert sum(stats.drafts_accepted) > 0 or (case["drafter"], case["model"]) == ("ngram", "qwen3_next")
    assert (stats.preemptions > 0) == case["preempt"]
    assert runner.deepest == case["depth"]
    if hit and not case["preempt"] and case["sampling"] != "listed":
        assert stats.prefix_hits > warmed.prefix_hits
    if case["chunk"]:
        assert max(int(p.prefill.count.max(initial=0)) for p in runner.plans) <= case["chunk"]
    if case["policy"] == "exclusive":
        assert stats.mixed_steps == 0
    else:
        assert any(p.prefill.rows and (p.decode.count > 1).any() for p in runner.plans), (
            "verified in a mixed step"
        )
    if case["sampling"] == "listed":
        assert any(answer.ends == ["stop"] for answer in answers.values())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_every_length_of_an_accepted_run(drafts: int, depth: int, reference: Reference) -> None:
    """A mostly correct drafter: runs of every length up to the longest are accepted."""
    case = {"model": "qwen3_moe", "sampling": "seeded"}
    knows = oracle(case, reference)
    knows._right = 0.85
    speculation = SpeculationSection(
        speculative_method="ngram", num_speculative_tokens=drafts, speculative_adaptive=False
    )
    engine, _ = make_engine(
        reference.folder("qwen3_moe"), depth=depth, speculation=speculation, drafter=knows
    )
    try:
        answers = run(
            engine, [[submit(i + 1, PROMPTS[i], SAMPLING["seeded"], request=i)] for i in range(BATCH)]
        )
    finally:
        engine.close()
    stats = engine.stats()
    for prompt in range(BATCH):
        check_same(answers[prompt + 1], reference.answer("qwen3_moe", "seeded", prompt, 0), str(prompt))
    assert all(stats.drafts[place] > stats.drafts_accepted[place] > 0 for place in range(drafts))
    assert sum(answer.accepted for answer in answers.values()) <= sum(stats.drafts_accepted)
    steps = sum(stats.drafts_accepted) + BATCH * OUTPUT  # far fewer than one token for each row and step
    assert stats.steps < steps


def test_a_drafter_that_is_always_right_takes_few_steps(reference: Reference) -> None:
    case = {"model": "qwen3_moe", "sampling": "greedy"}
    knows = oracle(case, reference)
    knows._right = 1.0
    speculation = SpeculationSection(
        speculative_method="ngram", num_speculative_tokens=3, speculative_adaptive=False
    )
    engine, _ = make_engine(reference.folder("qwen3_moe"), speculation=speculation, drafter=knows)
    try:
        answers = run(engine, [[submit(1, PROMPTS[0], SAMPLING["greedy"], request=0)]])
    finally:
        engine.close()
    check_same(answers[1], reference.answer("qwen3_moe", "greedy", 0, 0), "")
    assert engine.stats().steps == 1 + -(-(OUTPUT - 1) // 4)
    assert (answers[1].accepted, answers[1].rejected) == (OUTPUT - engine.stats().steps, 0)
