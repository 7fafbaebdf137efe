"""Tests of which some cases run by default, and the others are slow: see docs/tests.md."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

ELSEWHERE = {"grid", "clients", "agents", "gpu"}
"""Marks of tests with targets of their own. A test with such a mark is not marked slow."""


def mostly_slow(
    names: str | Sequence[str], values: Iterable[Any], kept: int | Collection[Any], **more: Any
) -> pytest.MarkDecorator:
    """Return a ``pytest.mark.parametrize`` in which only ``kept`` values, or the first ``kept``, run by
    default.

    The other values are slow. A ``pytest.param`` keeps its name and marks.
    """
    values, one_name = list(values), isinstance(names, str) and "," not in names
    chosen = values[:kept] if isinstance(kept, int) else list(kept)
    assert chosen, "none is left by default"
    assert all(one in values for one in chosen), f"{chosen} of {values}"
    made = [one if one in chosen else _slow(one, one_name) for one in values]
    return pytest.mark.parametrize(names, made, **more)


def seeds(default: int | Sequence[int], slow: int, grid: int) -> pytest.MarkDecorator:
    """Return a ``pytest.mark.parametrize`` of ``seeds``, numbers for random loads.

    The seeds ``default``, or the first ``default``, run by default. The other seeds up to ``slow`` are slow.
    The seeds from there up to ``grid`` belong to the grid.
    """
    chosen = range(default) if isinstance(default, int) else default
    rest = [seed for seed in range(slow) if seed not in chosen]
    more = [(rest, pytest.mark.slow), (range(slow, grid), pytest.mark.grid)]
    return pytest.mark.parametrize(
        "seeds", [chosen, *(pytest.param(each, marks=mark) for each, mark in more if each)]
    )


def _slow(one: Any, one_name: bool) -> Any:
    marks = getattr(one, "marks", None)
    if marks is None:
        return pytest.param(*([one] if one_name else one), marks=pytest.mark.slow)
    if any(mark.name in ELSEWHERE for mark in marks):
        return one
    return pytest.param(*one.values, id=one.id, marks=[*marks, pytest.mark.slow])
