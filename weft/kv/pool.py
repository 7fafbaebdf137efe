"""Blocks of one cache kind: references to them, which are cached, and when they may be used again.

A block is in exactly one of these places:

    free ──take──> held (references > 0) ──last reference gone──> free          if it was never published
                     │         ^   ╰────────────────────────────> cached (LRU) if its content is in the index
                  publish      ╰──share── cached
                                          cached ──take evicts it──> held, and out of the index
                     (in place of cached: kept, if somebody keeps its content; evicted after all cached ones)
                                          cached ──forget──> free, and out of the index

A reference given back while plans in flight still name the block lasts until the last of them commits.

A *hold* is a reference of a reader or writer outside the group (a transfer). It belongs to no step, and
outlives ``reset``. A block is free again after its last step and its last hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from weft.common.errors import EngineDead
from weft.kv.prefix_log import PrefixLog

NULL_BLOCK = 0


class BlockPool:
    """``num_blocks`` blocks with ids 1 .. num_blocks; 0 is the null block, which is never allocated."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # the last is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # the LRU order, oldest first
        self._kept: OrderedDict[int, None] = OrderedDict()  # likewise
        self._keeps: dict[bytes, int] = {}  # content -> how often it is kept, if at all
        self._references = [0] * (num_blocks + 1)
        self._key: list[bytes | None] = [None] * (num_blocks + 1)
        self._index: dict[bytes, int] = {}
        self._pending: dict[int, list[int]] = {}  # step -> references that end when it commits
        self._holds: dict[int, int] = {}  # block -> how many of its references are holds, if any
        self._last_commit = -1
        self._log: PrefixLog | None = None

    def follow(self) -> PrefixLog:
        """The pool's log of its index, which the first call makes: it begins with what is in the index."""
        if self._log is None:
            self._log = PrefixLog(self._index)
        return self._log

    def available(self) -> int:
        """Blocks that ``take`` can give now: free ones, and cached ones without references."""
        return len(self._free) + len(self._cached) + len(self._kept)

    def pending(self) -> int:
        """Blocks that will be available once every step planned so far has committed."""
        ending: dict[int, int] = {}
        for blocks in self._pending.values():
            for block in blocks:
                ending[block] = ending.get(block, 0) + 1
        return sum(1 for block, count in ending.items() if self._references[block] == count)

    def find(self, key: bytes) -> int:
        """The block whose content is ``key``, or the null block. Changes nothing."""
        return self._index.get(key, NULL_BLOCK)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys``, counted up to the first that is in no block, are there."""
        index = self._index
        for count, key in enumerate(keys):
            if key not in index:
                return count
        return len(keys)

    def held(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` are in blocks with references; sharing those leaves ``available`` as it is."""
        index = self._index
        references = self._references
        return sum([references[index.get(key, NULL_BLOCK)] > 0 for key in keys])

    def take(self) -> int:
        """A block of unknown content, with one reference. Evicts the least recently used block if needed.

        Raises EngineDead when none is available: callers ask first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached or self._kept:
            block, _ = (self._cached or self._kept).popitem(last=False)
            self._forget(block)
        else:
            raise EngineDead("a block was taken from a pool that has none")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a published block."""
        if self._key[block] is None:
            raise EngineDead("a block was shared that is not in the prefix index")
        if self._references[block] == 0:
            del self._place(block)[block]
        self._references[block] += 1

    def keep(self, key: bytes) -> None:
        """While a block has the content ``key``, it is evicted after those that nobody keeps."""
        self._keeps[key] = self._keeps.get(key, 0) + 1
        block = self._index.get(key, NULL_BLOCK)
        if block in self._cached:
            del self._cached[block]
            self._kept[block] = None

    def unkeep(self, key: bytes) -> None:
        """The other side of one ``keep``: if nobody keeps it now, it is the next to be evicted."""
        left = self._keeps.pop(key) - 1
        if left:
            self._keeps[key] = left
            return
        block = self._index.get(key, NULL_BLOCK)
        if block in self._kept:
            del self._kept[block]
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """Puts a full block with references into the index. It must not be written from now on.

        When another block has this content already, that one stays the indexed one.
        """
        if self._references[block] == 0:
            raise EngineDead("a block was published that has no references")
        if self._key[block] is None and key not in self._index:
            self._key[block] = key
            self._index[key] = block
            if self._log is not None:
                self._log.add(key)

    def forget(self, key: bytes) -> None:
        """Frees the block whose content is ``key``, unless it is held. Nothing happens when there is none."""
        block = self._index.get(key, NULL_BLOCK)
        if block != NULL_BLOCK and not self._references[block]:
            del self._place(block)[block]
            self._forget(block)
            self._free.append(block)

    def release(self, block: int, after_step: int) -> None:
        """Gives back one reference, at once or when ``after_step`` commits."""
        if after_step > self._last_commit:
            self._pending.setdefault(after_step, []).append(block)
        else:
            self._drop(block)

    def hold(self, block: int) -> None:
        """One more hold on a block with references. Raises EngineDead for any other."""
        if not self._references[block]:
            raise EngineDead("a block was put on hold that has no references")
        self._references[block] += 1
        self._holds[block] = self._holds.get(block, 0) + 1

    def unhold(self, block: int) -> None:
        """Gives back one hold. Raises EngineDead when there is none."""
        left = self._holds.pop(block, 0) - 1
        if left < 0:
            raise EngineDead("a block was given back that is not on hold")
        if left:
            self._holds[block] = left
        self._drop(block)

    def on_hold(self, block: int) -> bool:
        """Whether ``block`` has a hold, whoever else has it."""
        return block in self._holds

    def num_on_hold(self) -> int:
        """Blocks that are on hold, with other references or without."""
        return len(self._holds)

    def reset(self) -> None:
        """Forgets all cached content and all plans in flight. The only references left are holds."""
        self._cached.clear()
        self._kept.clear()
        self._keeps.clear()
        self._index.clear()
        if self._log is not None:
            self._log.clear()
        self._pending.clear()
        self._key = [None] * (self.num_blocks + 1)
        self._references = [self._holds.get(block, 0) for block in range(self.num_blocks + 1)]
        self._free = [block for block in range(self.num_blocks, 0, -1) if not self._references[block]]

    def committed(self, step: int) -> None:
        """``step`` and all before it have committed."""
        self._last_commit = step
        for due in [s for s in self._pending if s <= step]:
            for block in self._pending.pop(due):
                self._drop(block)

    def _drop(self, block: int) -> None:
        left = self._references[block] - 1
        if left < 0:
            raise EngineDead("a block was released more often than it was held")
        self._references[block] = left
        if left == 0:
            if self._key[block] is None:
                self._free.append(block)
            else:
                self._place(block)[block] = None

    def _place(self, block: int) -> OrderedDict[int, None]:
        """Where a published block is that has no references."""
        return self._kept if self._key[block] in self._keeps else self._cached

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._index[key]
            self._key[block] = None
            if self._log is not None:
                self._log.remove(key)
