"""Exact tokens under DoRA adapters: equal to the merged checkpoint, beside plain adapters and base rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e0.test_loras import TARGETS, World, together
from tests.e0.test_loras_ranks import on_two_ranks

SHAPES = ["llama", *(pytest.param(s, marks=pytest.mark.slow) for s in ("deepseek_v3", "qwen3_next"))]


@pytest.mark.parametrize("shape", SHAPES)
def test_one_batch_of_base_and_adapters(shape: str, tmp_path: Path) -> None:
    world = World(tmp_path, shape, TARGETS[shape], use_dora=True)
    together(world, chunk=8, depth=2)
    world.check(on_two_ranks(world, depth=1))
