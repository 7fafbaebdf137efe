"""Training rows: drills contain nothing that is reserved for the test split."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerFast

from training.rows import Encoder, draw_step
from weft.config.hub import bundled_models
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


def test_lines_to_recall_come_twice_and_their_heads_do_not_count() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bundled_models()["spool-text"])
    encoder, rng = Encoder(tokenizer, 0.1), random.Random(4)
    moved = 0
    for _ in range(50):
        row = encoder.recall(rng)
        half = len(row.ids) // 2
        assert len(row.ids) == len(row.weights) == 2 * half
        assert sorted(row.ids[:half]) == sorted(row.ids[half:])
        assert min(row.ids) >= 3, "no special token"
        assert row.weights[: half + 2] == [0.0] * half + [0.0, 1.0]
        moved += row.ids[:half] != row.ids[half:]
        heads = [i for i, weight in zip(row.ids[half:], row.weights[half:], strict=True) if weight == 0.0]
        assert len(set(heads)) == len(heads) >= 3
    assert moved > 30
