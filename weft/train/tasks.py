"""Tasks with a reward: questions, and a number for each answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from weft.common.registry import Registry
from weft.eval import gsm_mini


class Question(NamedTuple):
    """One question of a task."""

    text: str
    expected: str
    """Expected answer, in the form of the task."""


class Task(Protocol):
    """Questions and rewards."""

    def training(self, seed: int) -> Iterator[Question]:
        """Yield the questions for training without end, in an order fixed by ``seed``."""

    def test(self, count: int) -> list[Question]:
        """Return the first ``count`` questions of the fixed test set."""

    def reward(self, question: Question, answer: str) -> float:
        """Return the reward of an answer, 0 to 1."""


class GsmMini:
    """Arithmetic word problems (``weft eval gsm-mini``): 1 for the exact number after ``####``, else 0."""

    def training(self, seed: int) -> Iterator[Question]:
        return (self._question(one) for one in gsm_mini.problems("train", seed))

    def test(self, count: int) -> list[Question]:
        return [self._question(one) for one in itertools.islice(gsm_mini.test_set(count), count)]

    def reward(self, question: Question, answer: str) -> float:
        found = gsm_mini.extract_answer(answer)
        return float(found is not None and str(found) == question.expected)

    def _question(self, problem: gsm_mini.Problem) -> Question:
        return Question(problem.question, str(problem.answer))


TASKS: Registry[type[Task]] = Registry("reward")
TASKS.add("gsm-mini", "weft.train.tasks:GsmMini")
