"""Step shapes for tests: consistent ones, made of rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from weft.scheduler.policy.step_cost import NAMES, CostModel, StepShape, pairs

TRUTH = CostModel.of(
    dict(
        zip(
            NAMES,
            (8e-3, 0.0, 1e-5, 4e-5, 6e-5, 6e-5, 2e-4, 7e-8, 2e-7, 1e-4, 5e-7, 0.0, 0.0, 0.0),
            strict=True,
        )
    )
)
"""A machine: steps of up to 16 tokens cost the same."""


def shape(prefill: Sequence[tuple[int, int]] = (), decode: Sequence[int] = ()) -> StepShape:
    """Return the shape of prefill rows (start, count) and decode rows at positions."""
    seen = sum(pairs(start, 1) for start in decode)
    made = StepShape(decode_rows=len(decode), decode_tokens=len(decode), decode_pairs=seen)
    for start, count in prefill:
        made = made.with_chunk(start, count)
    return made


def random_shape(rng: random.Random) -> StepShape:
    """Return a shape of 0 to 4 chunks and 0 to 64 decode rows, at least one row in all."""
    prefill = [
        (rng.randrange(4000), int(600 ** rng.random())) for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 4]))
    ]
    rows = rng.choice([0, 1, rng.randrange(64), 64]) if prefill else rng.randint(1, 64)
    context = int(4000 ** rng.random())
    return shape(prefill, [rng.randrange(context) for _ in range(rows)])
