"""The KV tier of a worker rank: executes the commands of the engine process and returns the reports."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.common.errors import EngineDead
from weft.runner.tier_thread import TierThread
from weft.types.tiers import BlocksCopied, TierCommand


class WorkerTier:
    """The tier of one worker. Used from the thread that serves the engine process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def take(self, command: TierCommand, tier: TierThread | None) -> None:
        """Queue a command for the tier thread of the rank. Raises EngineDead if the rank has no tier."""
        if tier is None:
            raise EngineDead("a copy of blocks was sent to a rank without a KV tier")
        tier.put(command)

    def joined(self, tier: TierThread | None) -> None:
        """Drop the commands of the previous engine process. Blocks until no copy is under way. Raises
        EngineDead after a time-out: the new engine process must not use blocks that a copy may still
        write."""
        if tier is not None:
            tier.stop_all()
            tier.take()

    def frames_of(self, tier: TierThread | None) -> Iterator[BlocksCopied]:
        """Yield the finished copies for the engine process. Other reports are dropped: the rank of the engine
        process reports the changes of the store."""
        for report in () if tier is None else tier.take():
            if isinstance(report, BlocksCopied):
                yield msgspec.structs.replace(report, rank=self._rank)
