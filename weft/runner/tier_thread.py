"""The KV tier of a rank, as used by the rank's runner and by its engine process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.types.tiers import BlocksCopied, StoreChanged, StoredElsewhere, StoreState, TierCommand

TierReport = BlocksCopied | StoreChanged | StoredElsewhere | StoreState


class TierThread(Protocol):
    """Copies blocks between the caches of a rank and a store, in a thread. Contract of
    ``weft.engine.tiers.rank_tier.RankTier``. Only ``stop_all`` and ``close`` block."""

    @property
    def descriptor(self) -> int:
        """File descriptor, readable while there are reports."""

    def wait(self, seconds: float) -> bool:
        """Block until the store is open or off, for at most ``seconds``. Return True if so."""

    def put(self, command: TierCommand) -> None:
        """Carry out a command when all steps launched so far have ended."""

    def take(self) -> Sequence[TierReport]:
        """Remove and return all reports, in order. Cheap when there are none."""

    def stop_preparing(self) -> None:
        """Take no further memory ahead of loads: the memory of the caches is given back."""

    def stop_all(self) -> None:
        """Drop all commands and wait until the rank touches no block of a command. Raises EngineDead after a
        time-out."""

    def close(self) -> None:
        """End the thread and close the store. Gives up a thread that a stuck disk holds."""


def tier_of(runner: object) -> TierThread | None:
    """Return the KV tier of a runner; None for a runner without a tier."""
    tier: TierThread | None = getattr(runner, "tier", None)
    return tier
