"""Memory for payloads, used again: fresh memory costs more than what is copied through it."""

from __future__ import annotations

import torch

from weft.transfer.pushes import WRITE_BYTES

BUFFER = WRITE_BYTES
"""Bytes of a payload's memory."""
_FREE = 4


class Buffers:
    """Buffers of one transport, used from its thread."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def give(self, size: int) -> torch.Tensor:
        """uint8 [size]."""
        whole = self._free.pop() if size <= BUFFER and self._free else None
        if whole is None:
            whole = torch.empty(max(size, BUFFER), dtype=torch.uint8)
        return whole[:size]

    def take_back(self, payload: torch.Tensor | None) -> None:
        """What ``give`` gave, if anything, is free again."""
        whole = None if payload is None else payload._base
        if len(self._free) < _FREE and whole is not None and whole.numel() == BUFFER:
            self._free.append(whole)
