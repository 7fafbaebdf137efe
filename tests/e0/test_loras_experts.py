"""Exact tokens under LoRA adapters of experts: equal to the merged checkpoint, in batches with other rows."""

from __future__ import annotations

import pytest

from tests.e0.test_loras import World, together
from tests.support.loras import EXPERTS

SHAPES = ["qwen3_moe", *(pytest.param(s, marks=pytest.mark.slow) for s in ("qwen3_next", "deepseek_v3"))]


@pytest.fixture(scope="module", params=SHAPES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp(request.param), request.param, EXPERTS)


def test_one_batch_of_base_and_adapters(world: World) -> None:
    together(world, chunk=8, depth=2)


@pytest.mark.slow
def test_a_pool_of_one_place(world: World) -> None:
    engine = together(world, places=1)
    assert engine.scheduler.adapters.placed >= 2
