"""gsm-mini: generated arithmetic word problems with worked steps, in the format of GSM8K.

Everything is derived from a seed, so the task needs no download. Two things are held out of training by hash:
sentence templates (see ``gsm_templates``), and operand pairs ``(op, a, b)`` with an operand of 10 or more.
Every test problem has only held-out templates and needs a held-out pair. Training problems never have either.

Randomness comes only from ``random.Random(str).random()``, which Python keeps stable across versions and
platforms.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from weft.eval.gsm_plots import write_story
from weft.eval.gsm_story import Impossible, Rng, Step
from weft.eval.gsm_templates import stable_hash

Split = Literal["train", "test"]

HELD_OUT_PAIR_MODULUS = 10
TEST_SEED = 2026


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the worked solution with ``#### answer`` at the end, and the templates and pairs used."""

    question: str
    solution: str
    answer: int
    template_ids: tuple[str, ...]
    pairs: tuple[tuple[str, int, int], ...]


def pair_key(op: str, a: int, b: int) -> tuple[str, int, int]:
    """Return the identity of an operand pair. Order does not count for + and x."""
    return (op, min(a, b), max(a, b)) if op in "+x" else (op, a, b)


def is_held_out_pair(op: str, a: int, b: int) -> bool:
    """Return True if an operand pair belongs to the test side.

    Facts known by heart are never held out: two one-digit numbers, the reversed multiplication table (42 /
    6), and a round number plus a digit (40 + 2).
    """
    op, a, b = pair_key(op, a, b)
    by_heart = (
        (a < 10 and b < 10)
        or (op == "/" and b < 10 and a // b < 10)
        or (op == "+" and a < 10 and b % 10 == 0)
    )  # fmt: skip
    return not by_heart and stable_hash(f"gsm-mini pair {op} {a} {b}") % HELD_OUT_PAIR_MODULUS == 0


def _pairs(step: Step) -> Iterator[tuple[str, int, int]]:
    """Yield the operand pairs in a worked line: the pair of the step and the pairs of its inner additions."""
    yield pair_key(step.op, step.a, step.b)
    for part in step.parts():
        yield pair_key(part.op, part.a, part.b)


def problems(split: Split, seed: int) -> Iterator[Problem]:
    """Yield problems of a split forever, in an order fixed by ``seed``."""
    rng = Rng(f"gsm-mini {split} {seed}")
    while True:
        try:
            story = write_story(rng, split == "test")
        except Impossible:
            continue
        # Test problems need a held-out step. Training excludes inner additions too, so no held-out pair is
        # ever shown.
        held_out = any(is_held_out_pair(step.op, step.a, step.b) for step in story.steps)
        shown = tuple(pair for step in story.steps for pair in _pairs(step))
        if split == "train" and any(is_held_out_pair(*pair) for pair in shown):
            continue
        if split == "test" and not held_out:
            continue
        lines = [step.text() for step in story.steps]
        solution = "\n".join([*lines, f"#### {story.value}"])
        yield Problem(story.question(), solution, story.value, tuple(story.template_ids), shown)


@cache
def _test_problems(n: int) -> tuple[Problem, ...]:
    """Return the first ``n`` distinct problems of the fixed test set."""
    seen: dict[str, Problem] = {}
    for problem in problems("test", TEST_SEED):
        seen.setdefault(problem.question, problem)
        if len(seen) == n:
            break
    return tuple(seen.values())


def test_set(n: int = 500) -> list[Problem]:  # noqa: PT028  (not a pytest test)
    """Return the first ``n`` distinct problems of the fixed test set."""
    return list(_test_problems(n))


test_set.__test__ = False  # type: ignore[attr-defined]  # pytest collects names that start with "test"

_ANSWER = re.compile(r"####\s*\$?\s*(-?\d[\d,]*)")


def extract_answer(text: str) -> int | None:
    """Return the number after the last ``####`` of a worked solution, or None."""
    found = _ANSWER.match(text, text.rfind("####")) if "####" in text else None
    return int(found.group(1).replace(",", "")) if found else None


def score(solutions: Iterable[str], expected: Iterable[Problem]) -> int:
    """Return the number of solutions that end in the expected answer."""
    pairs = zip(solutions, expected, strict=True)
    return sum(extract_answer(text) == problem.answer for text, problem in pairs)
