"""Rules for the memory that embedding transfers write and read, from the knowledge of the cluster."""

from __future__ import annotations

from testing.cluster.check import require
from testing.cluster.transfers.transfer_rules import TransferRules


class ImageRules(TransferRules):
    """Rules for the embedding memory of one rank's process."""

    cache = "embeddings"

    def check_step(self, step: int, blocks: set[int]) -> None:
        """Raise Violation if a step writes ``blocks`` that a transfer may write."""
        engine_process = self._engine_process()
        if engine_process is None:
            return
        for key in engine_process.engine.image_transfers():
            held = engine_process.engine.held_for("embeddings", key) or set()
            wrong = (
                f"{engine_process.name}: step {step} writes blocks {sorted(blocks & held)}, "
                f"which are promised to {key}"
            )
            require(not blocks & held, wrong)
