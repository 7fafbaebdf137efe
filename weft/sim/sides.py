"""All memory of a simulated rank that other groups read or write: its caches of sequences, its embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from weft.engine.worker_rooms import WorkerRooms
from weft.sim.embedding_side import EmbeddingSide
from weft.sim.rank_side import RankSide
from weft.sim.transfer_side import TransferSide
from weft.types import frames as f
from weft.types.plan import StepPlan
from weft.types.rooms import Endpoint

CACHES: tuple[f.Cache, ...] = ("kv", "embeddings")


class Sides(NamedTuple):
    """The memory of one rank's process; None where its group moves nothing of that kind."""

    kv: RankSide | None
    embeddings: EmbeddingSide | None

    def of(self, cache: f.Cache) -> TransferSide | None:
        return self.kv if cache == "kv" else self.embeddings

    def endpoint(self, cache: f.Cache) -> Endpoint | None:
        """Where it takes bytes."""
        side = self.of(cache)
        return None if side is None else side.endpoint

    def reset(self) -> None:
        """An epoch begins: all slots are empty."""
        for side in (self.kv, self.embeddings):
            if side is not None:
                side.reset()

    def run(self, plan: StepPlan) -> None:
        """Carries a step out. Raises Violation where it reads what is not its own."""
        if self.embeddings is not None:
            self.embeddings.run(plan)
        if self.kv is not None:
            self.kv.run(plan)

    def close(self) -> None:
        """The process has ended."""
        for side in (self.kv, self.embeddings):
            if side is not None:
                side.close()


class Words:
    """What a rank hears and says of rooms of both kinds, as ``weft.engine.worker`` passes it on."""

    def __init__(self, rank: int) -> None:
        self._of = {cache: WorkerRooms(rank, cache) for cache in CACHES}

    def joined(self, sides: Sides | None) -> None:
        """The rank works for another head."""
        for cache, rooms in self._of.items():
            rooms.joined(None if sides is None else sides.of(cache))

    def take(self, frame: f.RoomToRank, sides: Sides) -> None:
        """Carries out ``frame``, which its head sent."""
        self._of[frame.cache].take(frame, sides.of(frame.cache))

    def said(self, sides: Sides) -> Iterator[f.RoomToHead]:
        """What its head is to hear."""
        for cache, rooms in self._of.items():
            if (side := sides.of(cache)) is not None:
                yield from rooms.said(side.take())
