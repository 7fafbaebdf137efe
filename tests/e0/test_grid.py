"""Exact tokens in float64 for any batch, chunks, policy, cache hits, preemption, depth and n.

The reference of every sequence is a run alone, in one step, without a cache. Each token of the reference is
the result of the rule for the tokens before it (``margins``).

The default run has every value of each feature, ``-m slow`` every pair, ``-m grid`` every combination.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e0.margins import MARGIN, guesses, smallest_margin
from tests.e0.rig import Answer, make_engine, run, submit
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.pairwise import covering, each_value, everything, name
from weft.types.messages import Submit
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
}
FEATURES: dict[str, list[Any]] = {
    "model": ["qwen3_moe", "qwen2_windowed", "qwen3_next", "deepseek_v3"],
    "chunk": [1, 7, 16, 64, 0],
    "policy": ["mixed", "exclusive"],
    "batch": [1, 6],
    "prefix": ["hit", "miss"],
    "preempt": [False, True],
    "depth": [1, 2],
    "n": [1, 2],
    "sampling": ["greedy", "seeded"],
}
CHEAP = {"batch": 1, "n": 1}
COVER = covering(FEATURES, cheap=CHEAP)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(17, 40))] for _ in range(16)]


PROMPTS = prompts()
FILLER = PROMPTS[15][:30]


class Reference:
    """Tokens of (model, sampling, prompt, choice) alone, with checked margins. Computed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self._guesses: dict[tuple[str, str], dict[tuple[int, int], Answer]] = {}
        self._tokens: dict[tuple[str, str, int, int], list[int]] = {}

    def folder(self, model: str) -> Path:
        if model not in self._folders:
            self._folders[model] = make_checkpoint(self._root, model)
        return self._folders[model]

    def tokens(self, model: str, sampling: str, prompt: int, choice: int) -> list[int]:
        key = (model, sampling, prompt, choice)
        if key not in self._tokens:
            folder, params = self.folder(model), SAMPLING[sampling]
            if (model, sampling) not in self._guesses:
                self._guesses[model, sampling] = guesses(folder, PROMPTS, params, 2)
            answer = self._guesses[model, sampling][prompt, choice]
            assert answer.ends == ["length"]
            one = submit(1, PROMPTS[prompt], params, request=prompt, choice=choice)
            margin = smallest_margin(folder, one, answer.tokens)
            assert margin > MARGIN, f"the fixture has a tie: {key} at {margin}"
            self._tokens[key] = answer.tokens
        return self._tokens[key]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("e0"))


def small(case: dict[str, Any]) -> int:
    """Return the blocks of a pool for one of the longest sequences, too few for two.

    Some entries of sparse attention stand for many positions.
    """
    return 10 if case["model"] == "deepseek_v4" else 9


def plan_submits(case: dict[str, Any]) -> tuple[list[list[Submit]], dict[int, tuple[int, int]]]:
    """Return (sequences to submit before each step, sequence -> (prompt, choice)). Arrivals are spread
    out."""
    params, arrivals, who = SAMPLING[case["sampling"]], [], {}
    for prompt in range(case["batch"]):
        group = []
        for choice in range(case["n"]):
            sequence = 100 * prompt + choice + 1
            who[sequence] = (prompt, choice)
            group.append(submit(sequence, PROMPTS[prompt], params, request=prompt, choice=choice))
        arrivals.append(group)
    if case["preempt"]:
        # An older request (by priority) grows into the blocks of the others.
        filler = TokenParams(temperature=0.0, max_tokens=8 * small(case) - 32)
        arrivals[0].append(submit(9999, FILLER, filler, request=9999, priority=-1))
    return arrivals, who


def check(case: dict[str, Any], reference: Reference) -> None:
    hit = case["prefix"] == "hit"
    engine, runner = make_engine(
        reference.folder(case["model"]),
        blocks=small(case) if case["preempt"] else 512,
        max_len=8 * small(case),
        chunk=case["chunk"],
        depth=case["depth"],
        policy=case["policy"],
        caching=hit,
        max_num_seqs=48,
    )
    try:
        if hit:
            # The filler is cached too. Otherwise the others may end during its prompt, at one token a step.
            known = [*PROMPTS[: case["batch"]], FILLER]
            once = TokenParams(max_tokens=1)
            run(engine, [[submit(5000 + i, ids, once, request=5000 + i) for i, ids in enumerate(known)]])
        warmed = engine.stats()
        arrivals, who = plan_submits(case)
        answers = run(engine, arrivals)
        stats = engine.stats()
    finally:
        engine.close()
    for sequence, (prompt, choice) in who.items():
        expected = reference.tokens(case["model"], case["sampling"], prompt, choice)
        assert answers[sequence].tokens == expected, f"prompt {prompt}, choice {choice}"
        assert answers[sequence].ends == ["length"]
    # The features were active.
    assert (stats.preemptions > 0) == case["preempt"]
    assert runner.deepest == case["depth"]
    if hit and not case["preempt"]:
        assert stats.prefix_hits > warmed.prefix_hits
    if case["n"] > 1 and not case["preempt"]:
        assert any(answers[s].num_cached for s, (_, choice) in who.items() if choice)
    if not hit and case["n"] == 1:
        assert stats.prefix_hits == 0
    if case["chunk"]:
        assert max(int(p.prefill.count.max(initial=0)) for p in runner.plans) <= case["chunk"]
    else:
        assert any(int(p.prefill.count.max(initial=0)) >= 17 for p in runner.plans)
    if case["policy"] == "exclusive":
        assert stats.mixed_steps == 0
    elif case["batch"] > 1:
        assert stats.mixed_steps > 0


@pytest.mark.requirement("B1", "B6", "B9", "B20")
@pytest.mark.parametrize("case", each_value(COVER), ids=name)
def test_pairwise_cover(case: dict[str, Any], reference: Reference) -> None:
    check(case, reference)


@pytest.mark.requirement("B20")
@pytest.mark.grid
@pytest.mark.parametrize("case", everything(FEATURES), ids=name)
def test_whole_grid(case: dict[str, Any], reference: Reference) -> None:
    check(case, reference)


def test_the_cover_covers_every_pair() -> None:
    for a in FEATURES:
        for b in FEATURES:
            if a < b:
                seen = {(row[a], row[b]) for row in COVER}
                assert seen == {(x, y) for x in FEATURES[a] for y in FEATURES[b]}
