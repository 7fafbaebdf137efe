"""Row orders of gated delta nets in GGUF files.

Published matrices have the value heads grouped by key head. Two kinds of files differ:

* ``qwen35``: value heads are tiled. The first value head of every key head comes first, then the second value
  head of every key head. llama.cpp can then repeat the keys without reordering.
* ``qwen3next``: the published matrix has queries, keys, values and gates of the first key head, then of the
  next key head. The file has all queries, all keys and all values in one tensor, and the gates in another.

Source: the conversion in ggml-org/llama.cpp, conversion/qwen.py.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


class DeltaHeads(msgspec.Struct, frozen=True):
    """Heads of the delta nets in a file."""

    k_heads: int
    v_heads: int
    values: int
    """Dims of all value heads together."""
    tiled: bool
    """True if value heads are tiled, False if value heads are grouped by key head."""

    @property
    def reorders(self) -> bool:
        """True if the file has another order of value heads than the published weights."""
        return self.tiled and self.v_heads > self.k_heads

    def grouped(self, rows: int) -> Order:
        """Return int64 [rows]: the stored row of each published row.

        ``rows`` is the number of value heads, of value dims, or of query, key and value dims together.
        Queries and keys come first and keep their order.
        """
        value_rows = self.values if rows >= self.values else self.v_heads
        order = np.arange(rows)
        if self.reorders:
            first = rows - value_rows
            heads = order[first:].reshape(self.v_heads // self.k_heads, self.k_heads, -1)
            order[first:] = heads.swapaxes(0, 1).reshape(-1)
        return order

    def by_key_head(self, rows: int) -> Order:
        """Return int64 [rows]: the stored row of each published row, for queries, keys, values and gates.

        Stored rows count through both tensors: first the rows of queries, keys and values, then of gates.
        """
        keys = (rows - 2 * self.values) // 2
        parts = np.split(np.arange(rows), np.cumsum([keys, keys, self.values]))
        return np.concatenate([part.reshape(self.k_heads, -1) for part in parts], axis=1).reshape(-1)
