"""Training rows: drills hold nothing that the test split keeps to itself."""

from __future__ import annotations

import random

from training.rows import draw_step
from weft.eval.gsm_mini import is_held_out_pair, test_set


def test_drills_never_show_a_held_out_pair() -> None:
    rng = random.Random(3)
    for _ in range(20_000):
        step = draw_step(rng)
        for shown in (step, *step.parts()):
            assert not is_held_out_pair(shown.op, shown.a, shown.b), step.text()


def test_held_out_pairs_exist_for_every_operation() -> None:
    held_out = {p[0] for problem in test_set(500) for p in problem.pairs if is_held_out_pair(*p)}
    assert held_out == set("+-x/")
