"""Rules for the memory that embedding transfers write and read, from the knowledge of the cluster."""

from __future__ import annotations

from testing.cluster.check import require
from testing.cluster.transfers.room_rules import RoomRules


class ImageRules(RoomRules):
    """Rules for the embedding memory of one rank's process."""

    cache = "embeddings"

    def check_step(self, step: int, blocks: set[int]) -> None:
        """Raise Violation if a step writes ``blocks`` that a transfer may write."""
        head = self._head()
        if head is None:
            return
        for key in head.engine.image_rooms():
            held = head.engine.held_for("embeddings", key) or set()
            wrong = (
                f"{head.name}: step {step} writes blocks {sorted(blocks & held)}, which are promised to {key}"
            )
            require(not blocks & held, wrong)
