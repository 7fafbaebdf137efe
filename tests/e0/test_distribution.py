"""Sampling with drafts has the distribution of the sampling rule: chi-square against exact probabilities."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e0.margins import _all_logits
from tests.e0.rig import make_engine, run, submit
from tests.support.checkpoints import VOCAB, make_checkpoint
from weft.config.sections.all import SpeculationSection
from weft.speculation.base import Drafter, Sampled
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

PROMPT = [5, 9, 2, 40, 40, 7]
SEQUENCES, TOP, TEMPERATURE = 1200, 3, 1.3
CRITICAL = 65.0
"""Limit of chi-square with 26 degrees of freedom, exceeded once in 30,000 times."""

Outcome = tuple[int, ...]


class Guess(Drafter):
    """A drafter that guesses among the possible tokens, with about every third guess correct."""

    def __init__(self, likely: list[int]) -> None:
        self._likely = np.array(likely)
        self._random = np.random.default_rng(1)

    def propose(self, step: Sampled) -> torch.Tensor | None:
        rows = step.wanted()
        if not len(rows):
            return None
        return torch.from_numpy(self._random.choice(self._likely, (len(rows), int(step.next_k.max()))))


def chances(folder: Path) -> dict[Outcome, float]:
    """Return the exact probability of every possible first three tokens."""

    def likeliest(ids: list[int]) -> list[tuple[int, float]]:
        row = _all_logits(folder, ids)[0][-1] / TEMPERATURE
        best = np.lexsort((np.arange(VOCAB), -row))[:TOP]
        weight = np.exp(row[best] - row[best[0]])
        return list(zip(best.tolist(), (weight / weight.sum()).tolist(), strict=True))

    made: dict[Outcome, float] = {}
    for first, p in likeliest(PROMPT):
        for second, q in likeliest([*PROMPT, first]):
            for third, r in likeliest([*PROMPT, first, second]):
                made[first, second, third] = p * q * r
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("distribution"), "llama")


def sampled(folder: Path, drafter: Drafter | None, drafts: int) -> tuple[Counter[Outcome], int, int]:
    """Return (count of each outcome, drafts accepted, drafts verified)."""
    speculation = SpeculationSection(
        speculative_method="ngram" if drafts else "none",
        num_speculative_tokens=drafts or 1,
        speculative_adaptive=False,
    )
    engine, _ = make_engine(folder, max_num_seqs=96, speculation=speculation, drafter=drafter, blocks=512)
    params = TokenParams(temperature=TEMPERATURE, top_k=TOP, max_tokens=3)
    submits: list[Submit] = [submit(n, PROMPT, params, request=n) for n in range(SEQUENCES)]
    try:
        answers = run(engine, [submits[begin : begin + 90] for begin in range(0, len(submits), 90)])
    finally:
        engine.close()
    stats = engine.stats()
    counts = Counter(tuple(answer.tokens) for answer in answers.values())
    return counts, sum(stats.drafts_accepted), sum(stats.drafts)


def chi_square(counts: Counter[Outcome], expected: dict[Outcome, float]) -> float:
    total = sum(counts.values())
    return sum((counts[o] - total * p) ** 2 / (total * p) for o, p in expected.items())


def test_the_distribution_is_the_rules(folder: Path) -> None:
    expected = chances(folder)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert SEQUENCES * min(expected.values()) > 3, "an outcome that is too rare for the test"
    plain, _, verified = sampled(folder, None, 0)
    assert verified == 0
    likely = sorted({token for outcome in expected for token in outcome})
    drafted, accepted, verified = sampled(folder, Guess(likely), 2)
    assert verified > accepted > SEQUENCES // 20
    for counts in (plain, drafted):
        assert set(counts) <= set(expected)
        assert chi_square(counts, expected) < CRITICAL
    assert drafted == plain
    wrong = {outcome: 0.5 / len(expected) + 0.5 * chance for outcome, chance in expected.items()}
    assert chi_square(plain, wrong) > CRITICAL, "the test would not notice"
