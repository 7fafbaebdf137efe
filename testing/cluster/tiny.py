"""The tiny engine of a simulated cluster: a few blocks suffice for every failure."""

from __future__ import annotations

import random

from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection
from weft.sim.engine import kv_config

BLOCK = 4
MAX_MODEL_LEN = 24


def tiny_engine(rng: random.Random) -> tuple[SchedulerSection, KVConfig]:
    """Return (scheduler settings, KV configuration) of a random tiny engine: few slots, few blocks, a short
    queue.
    """
    sequences = rng.choice((2, 3))
    section = SchedulerSection(
        max_num_seqs=sequences,
        max_num_batched_tokens=rng.choice((8, 16)),
        max_queued_requests=rng.choice((1, 2, 4)),
        steps_in_flight=rng.choice((1, 2)),
        step_policy=rng.choice(("mixed", "mixed", "exclusive")),
    )
    tokens = rng.choice((1, 2, 3)) * MAX_MODEL_LEN + BLOCK
    kv = kv_config(section, MAX_MODEL_LEN, tokens=tokens, block_size=BLOCK, caching=rng.random() < 0.7)
    return section, kv
