"""Suggestions for misspelt names."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MOST = 2
"""Maximum letters added, omitted or changed by a misspelling."""


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """Return the intended member of ``known`` for a misspelt ``name``, or None.

    At most two letters may differ (one in names of up to four letters), and no digit: "KimiK3" is a different
    model from "KimiK2". Case, dashes and underscores are ignored. Returns the nearest member.
    """
    folded = _folded(name)
    most = _MOST if len(folded) > 4 else 1
    found: list[tuple[int, str]] = []
    for one in known:
        other = _folded(one)
        if abs(len(other) - len(folded)) <= most and _digits(folded) == _digits(other):
            distance = _distance(folded, other)
            # An added capital is a variant: "NemotronH" is a different model from "Nemotron".
            longer = len(folded) != len(other) and _mixed(name) and _mixed(one)
            variant = longer and _capitals(name) != _capitals(one)
            if distance <= most and not variant:
                found.append((distance, one))
    return min(found)[1] if found else None


def _folded(name: str) -> str:
    return re.sub(r"[-_]", "", name.lower())


def _digits(name: str) -> str:
    return "".join(letter for letter in name if letter.isdigit())


def _mixed(name: str) -> bool:
    """Return True for a name with small and capital letters."""
    return name != name.lower() and name != name.upper()


def _capitals(name: str) -> int:
    return sum(letter.isupper() for letter in name)


def _distance(one: str, other: str) -> int:
    """Return the minimum number of insertions, deletions, substitutions and swaps of neighbours between two
    strings.
    """
    before, row = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        # Row i of the edit distance table; `before` is row i - 1, `above` row i - 2 (for swaps).
        before, above, row = row, before, [i]
        for j, target in enumerate(other, 1):
            least = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != target))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == target:
                least = min(least, above[j - 2] + 1)
            row.append(least)
    return row[-1]
