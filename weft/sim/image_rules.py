"""What must hold of the memory that rooms of embeddings write to and read from, as the cluster knows it."""

from __future__ import annotations

from weft.sim.check import require
from weft.sim.room_rules import RoomRules


class ImageRules(RoomRules):
    """Rules for the memory of embeddings of one rank's process."""

    cache = "embeddings"

    def check_step(self, step: int, blocks: set[int]) -> None:
        """Raises Violation where ``blocks``, which a step writes, are some that a room may write."""
        head = self._head()
        if head is None:
            return
        for key in head.engine.image_rooms():
            held = head.engine.held_for("embeddings", key) or set()
            wrong = (
                f"{head.name}: step {step} writes blocks {sorted(blocks & held)}, which are promised to {key}"
            )
            require(not blocks & held, wrong)
