"""Interleave test files that wait with test files that compute.

Tests of servers and ranks mostly wait for processes and time-outs, and their folders are neighbours in the
alphabet. If all processes of ``make test`` ran such tests at once, the cores would be idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

WAIT = frozenset(("api", "bench", "bench_compare", "clients", "cluster", "faults", "front", "launch"))
WAIT |= {"links", "media", "overlap", "parallel", "transports"}
"""Folders of tests/ whose tests wait for processes; tests of the other folders compute."""


def by_turns(files: Sequence[Path]) -> list[Path]:
    """Return ``files`` (below tests/) with the two kinds evenly interleaved, each kind in its original
    order.
    """
    kinds: dict[bool, list[Path]] = {True: [], False: []}
    for file in files:
        kinds[file.parts[0] in WAIT].append(file)
    places = {file: (n + 0.5) / len(kind) for kind in kinds.values() for n, file in enumerate(kind)}
    return sorted(places, key=lambda file: places[file])
