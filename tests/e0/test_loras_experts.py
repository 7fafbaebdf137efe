"""Exact tokens under LoRA adapters of experts: equal to the merged checkpoint, in batches with other rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e0.test_loras import World, together
from tests.support.loras import EXPERTS

SHAPES = ["qwen3_moe", *(pytest.param(s, marks=pytest.mark.slow) for s in ("qwen3_next", "deepseek_v3"))]


@pytest.fixture(scope="module", params=SHAPES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp(request.param), request.param, EXPERTS)


def test_one_batch_of_base_and_adapters(world: World) -> None:
    together(world, chunk=8, depth=2)


@pytest.mark.parametrize(
    "shape", ["qwen3_moe", *(pytest.param(s, marks=pytest.mark.slow) for s in ("qwen3_next", "deepseek_v3"))]
)
def test_lengths_of_rows(shape: str, tmp_path: Path) -> None:
    """DoRA of routed and shared experts, beside a plain adapter and base rows, in one place and two."""
    world = World(tmp_path, shape, EXPERTS, use_dora=True)
    together(world, chunk=8, depth=2)
    together(world, places=1)


@pytest.mark.slow
def test_a_pool_of_one_place(world: World) -> None:
    engine = together(world, places=1)
    assert engine.scheduler.adapters.placed >= 2
