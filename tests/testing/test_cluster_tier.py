"""A KV tier in the simulated cluster: invariants over schedules with a disk that fails, and a planted bug."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from testing.cluster.check import Violation
from testing.cluster.cluster import simulate_cluster
from testing.cluster.sim_tier import TIERED
from weft.kv.tiers import TierBook
from weft.types.tiers import BlockOutcome, Entry

SEEDS = [seed for seed in range(2000) if seed % 10 in TIERED]
FOUND_BY = 95
"""Schedule that detected the planted bug before; it runs first."""


@pytest.mark.parametrize("seeds", [SEEDS[:25], pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_invariants_hold_with_a_tier(seeds: list[int]) -> None:
    """Tokens, blocks and pins, with stalls, damage, a full disk, several writers, and killed processes."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += simulate_cluster(seed).counts
    assert counts["blocks stored: done"]
    assert counts["blocks loaded: done"]
    if len(seeds) > 100:
        assert counts["blocks loaded: corrupt"]
        assert counts["blocks stored: off"]
        assert counts["blocks stored: skipped"]


def test_a_failed_load_that_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a block enters the prefix cache although its record was damaged."""
    insert_loaded = TierBook._insert_loaded

    def trusting(self: TierBook, entry: Entry, block: int, outcome: BlockOutcome, void: bool) -> None:
        insert_loaded(self, entry, block, BlockOutcome.DONE, void)

    monkeypatch.setattr(TierBook, "_insert_loaded", trusting)
    with pytest.raises(Violation, match="whose load has failed"):
        _simulate((FOUND_BY, *SEEDS))


def _simulate(seeds: Iterable[int]) -> None:
    for seed in seeds:
        simulate_cluster(seed)
