"""The order of test files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.order import WAIT, by_turns


@pytest.mark.parametrize(("waiting", "computing"), [(3, 9), (8, 4), (1, 1), (0, 3), (2, 0)])
def test_either_kind_is_spread_over_the_other(waiting: int, computing: int) -> None:
    waits = [Path("front", f"test_{number}.py") for number in range(waiting)]
    computes = [Path("models", f"test_{number}.py") for number in range(computing)]
    files = by_turns([*waits, *computes])
    assert [file for file in files if file.parts[0] == "front"] == waits
    assert [file for file in files if file.parts[0] == "models"] == computes
    for end in range(len(files) + 1):
        share = sum(file.parts[0] == "front" for file in files[:end])
        assert abs(share - end * waiting / len(files)) < 1


def test_folders_that_wait_are_there() -> None:
    tests = Path(__file__).parents[1]
    assert all((tests / folder).is_dir() for folder in WAIT)
