"""Reusable payload memory: fresh memory costs more than the copy through the memory."""

from __future__ import annotations

import torch

from weft.disagg.protocol.pushes import WRITE_BYTES

BUFFER = WRITE_BYTES
"""Bytes of one payload buffer."""
_FREE = 4


class Buffers:
    """Payload buffers of one transport. Used from the transport's thread."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def give(self, size: int) -> torch.Tensor:
        """Return uint8 [size], uninitialised."""
        whole = self._free.pop() if size <= BUFFER and self._free else None
        if whole is None:
            whole = torch.empty(max(size, BUFFER), dtype=torch.uint8)
        return whole[:size]

    def take_back(self, payload: torch.Tensor | None) -> None:
        """Take back a buffer of ``give``. No effect for None."""
        whole = None if payload is None else payload._base
        if len(self._free) < _FREE and whole is not None and whole.numel() == BUFFER:
            self._free.append(whole)
