"""The description of every kind's tensors; it lives in ``weft.config.layout``, which sizing reads, too."""

from __future__ import annotations

from weft.config.layout import FP8, ITEM_BYTES, TensorLayout, block_bytes, pool_tensors, slot_tensors

__all__ = ["FP8", "ITEM_BYTES", "TensorLayout", "block_bytes", "pool_tensors", "slot_tensors"]
