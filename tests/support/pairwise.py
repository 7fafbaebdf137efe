"""A small set of combinations in which every pair of values of every two features occurs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

Row = tuple[str, dict[str, Any]]


def covering(
    features: dict[str, list[Any]], seed: int = 0, cheap: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return combinations that cover every pair of values, by a greedy and deterministic search.

    ``cheap`` names the cheapest value of features with unequal costs; it is used wherever no pair needs
    another.
    """
    names = list(features)
    rng = random.Random(seed)
    uncovered = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in features[a] for y in features[b]
    }

    def gain(row: dict[str, Any]) -> int:
        return sum((a, row[a], b, row[b]) in uncovered for a, b in itertools.combinations(names, 2))

    rows = []
    while uncovered:
        a, x, b, y = min(uncovered, key=repr)
        candidates = []
        for _ in range(40):
            row = {name: rng.choice(values) for name, values in features.items()}
            candidates.append({**row, a: x, b: y})
        best = max(candidates, key=gain)
        rows.append(best)
        uncovered -= {(p, best[p], q, best[q]) for p, q in itertools.combinations(names, 2)}
    _lighten(rows, cheap or {})
    return rows


def few_of(rows: list[Row]) -> list[Row]:
    """Return a small subset of ``rows`` that contains each value of each feature.

    A row is (name, combination of feature values).
    """
    missing = {(key, repr(value)) for _, row in rows for key, value in row.items()}
    kept: list[Row] = []
    while missing:
        best = max(rows, key=lambda one: sum((key, repr(value)) in missing for key, value in one[1].items()))
        kept.append(best)
        missing -= {(key, repr(value)) for key, value in best[1].items()}
    return kept


def _pairs(row: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)]


def _lighten(rows: list[dict[str, Any]], cheap: dict[str, Any]) -> None:
    """Set features to the cheap value in every row whose pairs also occur elsewhere. Changes ``rows``."""
    count = Counter(pair for row in rows for pair in _pairs(row))
    for row in rows:
        for feature, value in cheap.items():
            lighter = {**row, feature: value}
            lost = set(_pairs(row)) - set(_pairs(lighter))
            if all(count[pair] > 1 for pair in lost):
                count.subtract(_pairs(row))
                row[feature] = value
                count.update(_pairs(row))


def everything(features: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return all combinations."""
    return [dict(zip(features, values, strict=True)) for values in itertools.product(*features.values())]


def sampled(features: dict[str, list[Any]], slow: bool = False) -> Any:
    """Return a ``parametrize`` of all combinations: a covering set runs by default, the others run in the
    grid.

    With ``slow`` only a part of the covering set runs by default, as in ``each_value``.
    """
    kept = covering(features)
    few = [case for _, case in few_of([("", case) for case in kept])][:BY_DEFAULT] if slow else kept
    cases = [
        pytest.param(
            *case.values(),
            marks=[] if case in few else [pytest.mark.slow] if case in kept else [pytest.mark.grid],
        )
        for case in everything(features)
    ]
    return pytest.mark.parametrize(tuple(features), cases)


BY_DEFAULT = 3
"""Rows of a covering set that run by default."""


def each_value(rows: list[dict[str, Any]]) -> list[Any]:
    """Return ``rows`` as test parameters. The first rows of a subset with each value of each feature run by
    default, ``BY_DEFAULT`` at most; the rest is slow.
    """
    return [pytest.param(rows[one.values[0]], marks=one.marks) for one in numbers_of(rows)]


def numbers_of(rows: list[dict[str, Any]]) -> list[Any]:
    """Return the indices of ``rows`` as test parameters, marked as in ``each_value``."""
    few = [row for _, row in few_of([("", row) for row in rows])][:BY_DEFAULT]
    return [
        pytest.param(place, marks=[] if row in few else [pytest.mark.slow]) for place, row in enumerate(rows)
    ]


def name(case: dict[str, Any]) -> str:
    """A combination as the name of a test."""
    return "-".join(f"{key}={value}" for key, value in case.items())
