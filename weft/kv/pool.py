"""Blocks of one KV cache group: references, cached contents, and when a block may be reused.

A block is in exactly one of the following places:

    free ──take──> in use (references > 0) ──last reference gone──> free          if never inserted
                     │         ^   ╰──────────────────────────────> cached (LRU)  if in the index
                   insert      ╰──share── cached
                                          cached ──take evicts──> in use, and out of the index
                     (retained instead of cached if the content is retained; evicted after all cached blocks)
                                          cached ──forget──> free, and out of the index

A reference released while plans in flight still name the block lasts until the last such plan commits.

A *pin* is a reference by a reader or writer outside the group (a transfer). A pin belongs to no step and
outlives ``reset``. A block is free after the last step and the last pin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from weft.common.errors import EngineDead
from weft.kv.prefix_log import PrefixLog

NULL_BLOCK = 0


class BlockPool:
    """``num_blocks`` blocks with ids 1 .. num_blocks. Block 0 is the null block and is never allocated."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # the last is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # LRU order, oldest first
        self._retained: OrderedDict[int, None] = OrderedDict()  # retained blocks, LRU order
        self._retains: dict[bytes, int] = {}  # content key -> number of retains
        self._references = [0] * (num_blocks + 1)
        self._key: list[bytes | None] = [None] * (num_blocks + 1)
        self._index: dict[bytes, int] = {}
        self._pending: dict[int, list[int]] = {}  # step -> references released by the commit
        self._pins: dict[int, int] = {}  # pinned block -> number of pins
        self._last_commit = -1
        self._log: PrefixLog | None = None

    def follow(self) -> PrefixLog:
        """Return the log of the index. The first call creates the log with the current content of the
        index."""
        if self._log is None:
            self._log = PrefixLog(self._index)
        return self._log

    def available(self) -> int:
        """Return the number of blocks available to ``take`` now: free blocks, and cached blocks without
        references."""
        return len(self._free) + len(self._cached) + len(self._retained)

    def pending(self) -> int:
        """Return the number of additional blocks available once every planned step has committed."""
        ending: dict[int, int] = {}
        for blocks in self._pending.values():
            for block in blocks:
                ending[block] = ending.get(block, 0) + 1
        # Available only if all references of the block end with planned steps.
        return sum(1 for block, count in ending.items() if self._references[block] == count)

    def find(self, key: bytes) -> int:
        """Return the block with content ``key``, or the null block. Changes nothing."""
        return self._index.get(key, NULL_BLOCK)

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading ``keys`` in the index, up to the first missing key."""
        index = self._index
        for count, key in enumerate(keys):
            if key not in index:
                return count
        return len(keys)

    def held(self, keys: Sequence[bytes]) -> int:
        """Return the number of ``keys`` in blocks with references. Sharing such blocks does not reduce
        ``available``."""
        index = self._index
        references = self._references
        return sum([references[index.get(key, NULL_BLOCK)] > 0 for key in keys])

    def take(self) -> int:
        """Return a block of unknown content with one reference. May evict the least recently used block.

        Raises EngineDead when no block is available: callers check first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached or self._retained:
            # Retained blocks go only when no other cached block is left.
            block, _ = (self._cached or self._retained).popitem(last=False)
            self._forget(block)
        else:
            raise EngineDead("a block was taken from a pool without free blocks")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to an inserted block. Raises EngineDead for a block outside the index."""
        if self._key[block] is None:
            raise EngineDead("a block outside the prefix index was shared")
        if self._references[block] == 0:
            del self._place(block)[block]
        self._references[block] += 1

    def retain(self, key: bytes) -> None:
        """Retain content ``key``: the block is evicted after all other blocks. Needs no block with the
        content. Each call needs one ``end_retention``."""
        self._retains[key] = self._retains.get(key, 0) + 1
        block = self._index.get(key, NULL_BLOCK)
        if block in self._cached:
            del self._cached[block]
            self._retained[block] = None

    def end_retention(self, key: bytes) -> None:
        """Undo one ``retain``. After the last ``retain`` of ``key``, a block without references is the next
        to be evicted.

        Raises KeyError for a key without a ``retain``.
        """
        left = self._retains.pop(key) - 1
        if left:
            self._retains[key] = left
            return
        block = self._index.get(key, NULL_BLOCK)
        if block in self._retained:
            del self._retained[block]
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)

    def insert(self, block: int, key: bytes) -> None:
        """Insert a full block with references into the index. The block must not be written from now on.

        If another block has the same content, the other block stays in the index. Raises EngineDead for a
        block without references.
        """
        if self._references[block] == 0:
            raise EngineDead("a block without references was inserted")
        if self._key[block] is None and key not in self._index:
            self._key[block] = key
            self._index[key] = block
            if self._log is not None:
                self._log.add(key)

    def forget(self, key: bytes) -> None:
        """Free the block with content ``key`` unless in use. Does nothing if there is no such block."""
        block = self._index.get(key, NULL_BLOCK)
        if block != NULL_BLOCK and not self._references[block]:
            del self._place(block)[block]
            self._forget(block)
            self._free.append(block)

    def forget_unused(self) -> None:
        """Free every cached block without references."""
        for block in (*self._cached, *self._retained):
            self._forget(block)
            self._free.append(block)
        self._cached.clear()
        self._retained.clear()

    def forget_all(self) -> int:
        """Remove every block from the index, and return the number of removed blocks.

        Blocks in use keep their references and become free with the last reference.
        """
        removed = len(self._index)
        self.forget_unused()
        for block in list(self._index.values()):
            self._forget(block)
        return removed

    def release(self, block: int, after_step: int) -> None:
        """Release one reference, at once or when ``after_step`` commits."""
        if after_step > self._last_commit:
            self._pending.setdefault(after_step, []).append(block)
        else:
            self._drop(block)

    def pin(self, block: int) -> None:
        """Pin a block in use. Raises EngineDead for any other block."""
        if not self._references[block]:
            raise EngineDead("a block without references was pinned")
        self._references[block] += 1
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        """Release one pin. Raises EngineDead if the block has none."""
        left = self._pins.pop(block, 0) - 1
        if left < 0:
            raise EngineDead("a block without a pin was unpinned")
        if left:
            self._pins[block] = left
        self._drop(block)

    def is_pinned(self, block: int) -> bool:
        """Return True if ``block`` has a pin."""
        return block in self._pins

    def num_pinned(self) -> int:
        """Return the number of pinned blocks."""
        return len(self._pins)

    def reset(self) -> None:
        """Forget all cached contents and all plans in flight. Only references by pins remain."""
        self._cached.clear()
        self._retained.clear()
        self._retains.clear()
        self._index.clear()
        if self._log is not None:
            self._log.clear()
        self._pending.clear()
        self._key = [None] * (self.num_blocks + 1)
        self._references = [self._pins.get(block, 0) for block in range(self.num_blocks + 1)]
        self._free = [block for block in range(self.num_blocks, 0, -1) if not self._references[block]]

    def committed(self, step: int) -> None:
        """Note the commit of ``step`` and all earlier steps; release the references of the steps."""
        self._last_commit = step
        for due in [s for s in self._pending if s <= step]:
            for block in self._pending.pop(due):
                self._drop(block)

    def _drop(self, block: int) -> None:
        """Release one reference now. The last reference makes the block free, or cached if inserted. Raises
        EngineDead without a reference."""
        left = self._references[block] - 1
        if left < 0:
            raise EngineDead("a block without references was released")
        self._references[block] = left
        if left == 0:
            if self._key[block] is None:
                self._free.append(block)
            else:
                self._place(block)[block] = None

    def _place(self, block: int) -> OrderedDict[int, None]:
        """Return the LRU list of an inserted block without references."""
        return self._retained if self._key[block] in self._retains else self._cached

    def _forget(self, block: int) -> None:
        """Remove a block from the index, if the block is in the index."""
        key = self._key[block]
        if key is not None:
            del self._index[key]
            self._key[block] = None
            if self._log is not None:
                self._log.remove(key)
