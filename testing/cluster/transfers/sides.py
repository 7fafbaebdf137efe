"""All memory of a simulated rank open to other groups: the KV cache and the embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from testing.cluster.transfers.embedding_side import EmbeddingSide
from testing.cluster.transfers.rank_side import RankSide
from testing.cluster.transfers.transfer_side import TransferSide
from weft.engine.ranks.worker_transfers import WorkerTransfers
from weft.types import frames as f
from weft.types.plan import StepPlan
from weft.types.transfer import Endpoint

CACHES: tuple[f.Cache, ...] = ("kv", "embeddings")


class Sides(NamedTuple):
    """The memory of one rank's process; None for memory without transfers."""

    kv: RankSide | None
    embeddings: EmbeddingSide | None

    def of(self, cache: f.Cache) -> TransferSide | None:
        return self.kv if cache == "kv" else self.embeddings

    def endpoint(self, cache: f.Cache) -> Endpoint | None:
        """Return the address of the memory for transfers of ``cache``; None without transfers."""
        side = self.of(cache)
        return None if side is None else side.endpoint

    def reset(self) -> None:
        """Empty all slots, because an epoch begins."""
        for side in (self.kv, self.embeddings):
            if side is not None:
                side.reset()

    def run(self, plan: StepPlan) -> None:
        """Run a step. Raise Violation if the step reads foreign content."""
        if self.embeddings is not None:
            self.embeddings.run(plan)
        if self.kv is not None:
            self.kv.run(plan)

    def close(self) -> None:
        """Close the transfers of an ended process."""
        for side in (self.kv, self.embeddings):
            if side is not None:
                side.close()


class Words:
    """The transfer frames of a rank, for both caches, handled as in ``weft.engine.ranks.worker``."""

    def __init__(self, rank: int) -> None:
        self._of = {cache: WorkerTransfers(rank, cache) for cache in CACHES}

    def joined(self, sides: Sides | None) -> None:
        """Prepare for the messages of another engine."""
        for cache, transfers in self._of.items():
            transfers.joined(None if sides is None else sides.of(cache))

    def take(self, frame: f.TransferToRank, sides: Sides) -> None:
        """Carry out ``frame``, which the engine sent."""
        self._of[frame.cache].take(frame, sides.of(frame.cache))

    def frames_of(self, sides: Sides) -> Iterator[f.TransferToEngine]:
        """Yield the reports for the engine."""
        for cache, transfers in self._of.items():
            if (side := sides.of(cache)) is not None:
                yield from transfers.frames_of(side.take())
