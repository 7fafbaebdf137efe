"""Exact tokens of sparse attention: window, groups of both types, experts by token id.

Beside the margins of the grid, every choice of groups behind a reference token must be clear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e0 import test_grid as grid
from tests.e0 import test_speculation as speculation
from tests.e0.margins import MARGIN
from tests.support.pairwise import covering, each_value, name
from tests.support.sparse_models import watch_cuts

FEATURES: dict[str, list[Any]] = {
    **grid.FEATURES,
    "model": ["deepseek_v4"],
    "batch": [1, 5],
    "n": [1],
    "sampling": ["greedy"],
}
DRAFTS: dict[str, list[Any]] = {
    **speculation.FEATURES,
    "model": ["deepseek_v4"],
    "drafter": ["oracle"],
    "drafts": [1, 3, 5],
    "adaptive": [False],
    "replayed": [False],  # its backend cannot be captured
    "depth": [1, 2],
    "chunk": [3, 7],
    "policy": ["mixed"],
    "n": [1],
    "sampling": ["greedy"],
}


@pytest.fixture(scope="module")
def cuts() -> Iterator[list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        yield watch_cuts(patch)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> grid.Reference:
    return grid.Reference(tmp_path_factory.mktemp("e0-sparse"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> speculation.Reference:
    return speculation.Reference(tmp_path_factory.mktemp("e0-sparse-drafts"))


@pytest.mark.requirement("B14", "B20")
@pytest.mark.parametrize("case", each_value(covering(FEATURES, cheap=grid.CHEAP)), ids=name)
def test_pairwise_cover(case: dict[str, Any], reference: grid.Reference, cuts: list[float]) -> None:
    grid.check(case, reference)
    assert min(cuts) > MARGIN, "the fixture has a tie among groups"


@pytest.mark.grid
@pytest.mark.parametrize("case", covering({**FEATURES, "batch": [1, 16]}), ids=name)
def test_larger_batches(case: dict[str, Any], reference: grid.Reference, cuts: list[float]) -> None:
    test_pairwise_cover(case, reference, cuts)


@pytest.mark.parametrize("case", each_value(covering(DRAFTS)), ids=name)
def test_drafts(case: dict[str, Any], answers: speculation.Reference) -> None:
    speculation.test_pairwise_cover(case, answers)
