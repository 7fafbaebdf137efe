"""The gain of a burst on ranks that share experts, in steps. ``bench.burst`` measures seconds."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest

from bench.burst import Burst, run
from tests.support.checkpoints import make_checkpoint
from tests.support.slowness import deadline
from weft.api.settings import read_settings
from weft.config.resolve import resolve
from weft.engine.core import EngineCore
from weft.types.messages import TokenEvent

TOKENS = 12


class Counted(EngineCore):
    """Record the steps of each request's first and last token."""

    def __init__(self, folder: Path, seats: int) -> None:
        settings = {
            "max_num_seqs": seats,
            "max_model_len": 64,
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "steps_in_flight": 1,
            "rank_timeout": deadline(120.0),
            "threads": 1,
        }
        super().__init__(resolve(read_settings(str(folder), settings)), progress=False)
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def step(self) -> list[TokenEvent]:
        events = super().step()
        for event in events:
            self.first.setdefault(event.sequence, self.stats().steps)
            self.last[event.sequence] = self.stats().steps
        return events


def burst(folder: Path, seats: int, size: int) -> tuple[Burst, int, int]:
    """Return (burst, step by which all requests have a first token, step of the last token)."""
    core = Counted(folder, seats)
    try:
        arguments = argparse.Namespace(prompt_tokens=8, tokens=TOKENS)
        made = run(core, arguments, size, random.Random(0), 0)
    finally:
        core.close()
    return made, max(core.first.values()), max(core.last.values())


@pytest.mark.requirement("A20")
@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_four_seats_answer_a_burst_in_far_fewer_steps_than_one(tmp_path: Path, size: int) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe")
    (one, first_one, last_one), (four, first_four, last_four) = (burst(folder, n, size) for n in (1, 4))
    assert one.tokens == four.tokens == size * TOKENS
    assert first_one >= 3 * first_four
    assert last_one >= 3 * last_four
    assert four.steps == last_four
