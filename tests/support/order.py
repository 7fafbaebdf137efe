"""Interleave test files that wait with test files that compute.

Tests of servers and ranks mostly wait for processes and time-outs, and their folders are neighbours in the
alphabet. If all processes of ``make test`` ran such tests at once, the cores would be idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

WAIT = frozenset(("api", "bench", "bench_compare", "clients", "cli", "faults", "front"))
WAIT |= {"control/links", "control/processes", "disagg/transport", "media", "overlap", "parallel"}
"""Folders of tests/ whose tests wait for others; those of the other folders compute."""


def by_turns(files: Sequence[Path]) -> list[Path]:
    """Return ``files`` (below tests/) with the two kinds evenly interleaved, each kind in its original
    order.
    """
    kinds: dict[bool, list[Path]] = {True: [], False: []}
    for file in files:
        kinds[any(parent.as_posix() in WAIT for parent in file.parents)].append(file)
    places = {file: (n + 0.5) / len(kind) for kind in kinds.values() for n, file in enumerate(kind)}
    return sorted(places, key=lambda file: places[file])
