"""A KV cache group for attention within chunks of positions."""

from __future__ import annotations

import numpy as np

from weft.kv.cache_groups import WindowGroup


class ChunkGroup(WindowGroup):
    """A token at position p reads the positions of its chunk up to p: p - p % window .. p.

    So all blocks before a chunk are released at once, when the sequence enters the chunk. A prefix hit needs
    only the blocks of its last chunk, and none at the end of a chunk.
    """

    def slide_each(self, slots: np.ndarray, committed: np.ndarray, after_step: np.ndarray) -> None:
        for row in np.flatnonzero((committed > 0) & (committed % self._window == 0)).tolist():
            self.slide(int(slots[row]), int(committed[row]), int(after_step[row]))

    def _first_read(self, position: int) -> int:
        return (position - position % self._window) // self.block_size

    def _first_sent(self, position: int, sent_block: int) -> int:
        read = position - position % self._window
        return max(read // size * size for size in (sent_block, self.block_size))
