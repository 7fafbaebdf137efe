"""The order of test files: those that wait and those that compute come by turns.

Tests of servers and ranks wait for processes and time-outs a good part of their time, and their folders are
neighbours in the alphabet. Where all processes of ``make test`` are among them at once, the cores are idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

WAIT = frozenset(("api", "bench", "bench_compare", "clients", "cli", "faults", "front"))
WAIT |= {"control/links", "control/processes", "disagg/transport", "media", "overlap", "parallel"}
"""Folders of tests/ whose tests wait for others; those of the other folders compute."""


def by_turns(files: Sequence[Path]) -> list[Path]:
    """``files`` (below tests/), either kind in its own order, and spread evenly over the other."""
    kinds: dict[bool, list[Path]] = {True: [], False: []}
    for file in files:
        kinds[any(parent.as_posix() in WAIT for parent in file.parents)].append(file)
    places = {file: (n + 0.5) / len(kind) for kind in kinds.values() for n, file in enumerate(kind)}
    return sorted(places, key=lambda file: places[file])
