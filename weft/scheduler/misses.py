"""Explain the end of the cached prefix of a prompt, at the first admission of a sequence."""

from __future__ import annotations

from collections.abc import Mapping

from weft.config.resolved import KVConfig
from weft.kv.caches import Caches
from weft.kv.hashing import salted_root
from weft.kv.prefix_memory import PrefixMemory, Remembered, first_difference
from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.slot_columns import SlotColumns
from weft.types.messages import CacheMiss

SHOWN = 32
"""Number of ids shown from the other prompt of a difference."""
ALIKE = 8
"""Minimum common leading tokens for a comparison with another prompt when no block is shared."""


class Misses:
    """Remembers sequences and explains misses. ``memory`` is None if nothing is to be remembered."""

    def __init__(
        self,
        kv: KVConfig,
        caches: Caches,
        live: Mapping[int, Sequence],
        columns: SlotColumns,
        most_bytes: int,
    ) -> None:
        """``live``, ``columns``: of the scheduler. ``most_bytes``: size of the memory; 0 for no memory."""
        self._kv = kv
        self._caches = caches
        self._live = live
        self._columns = columns
        remembers = most_bytes and kv.enable_prefix_caching
        self.memory = PrefixMemory(kv.block_size, most_bytes) if remembers else None

    def admitted(self, sequence: Sequence, num_hit: int) -> None:
        """Remember ``sequence`` at its first slot. If requested, set ``sequence.miss``: why the cache had no
        more. ``num_hit``: cached positions."""
        if sequence.explains:
            sequence.miss = self._explain(sequence, num_hit)
        self._remember(sequence)

    def left(self, sequence: Sequence, computed: int) -> None:
        """Remember ``sequence`` at the loss of the slot. ``computed``: number of cached positions. Does
        nothing without a memory."""
        if self.memory is not None:
            self._remember(sequence)
            self.memory.reached(sequence.id, computed)

    def _remember(self, sequence: Sequence) -> None:
        """Store ids and block hashes of ``sequence`` in the memory. Does nothing without a memory or without
        hashes."""
        if self.memory is not None and sequence.chain is not None:
            hashes = sequence.chain.grow(sequence.tokens, len(sequence.tokens))
            root = salted_root(sequence.salt, sequence.adapter, sequence.weights)
            self.memory.remember(sequence.id, sequence.salt, root, sequence.tokens, hashes, sequence.client)

    def _explain(self, sequence: Sequence, num_hit: int) -> CacheMiss:
        """Return why the cached prefix ended at ``num_hit``: "none" for the longest possible hit, "disabled"
        without a memory or with parts never read from the cache, else by comparison with remembered
        sequences."""
        memory, chain = self.memory, sequence.chain
        length = len(sequence.tokens)
        # The hit is as long as possible.
        if (length - 1) // self._caches.unit * self._caches.unit <= num_hit:
            return CacheMiss(reason="none", position=num_hit)
        if memory is None or chain is None or sequence.may_skip() < length - 1:
            return CacheMiss(reason="disabled", position=num_hit)
        first = num_hit // self._kv.block_size
        found = memory.having(chain.hashes[first])
        if found is not None:
            return CacheMiss(reason=self._lost(found, chain.hashes, num_hit, length - 1), position=num_hit)
        return self._unseen(sequence, memory, chain.hashes, num_hit)

    def _lost(self, found: Remembered, hashes: list[bytes], num_hit: int, limit: int) -> str:
        """Return why the cache does not have a block of ``found``: "state" (only the recurrent state is
        missing), "evicted", "computing" (``found`` is still live) or "new" (``found`` ended before)."""
        computed = found.computed
        other = self._live.get(found.sequence)
        if other is not None and isinstance(other.state, Running):
            computed = max(computed, int(self._columns.num_computed[other.state.slot]))
        if computed >= num_hit + self._caches.unit:
            return "state" if self._caches.hit_of_entries(hashes, limit) > num_hit else "evicted"
        return "computing" if other is not None else "new"

    def _unseen(
        self, sequence: Sequence, memory: PrefixMemory, hashes: list[bytes], num_hit: int
    ) -> CacheMiss:
        """Explain a block without a remembered sequence: find a sequence with a different continuation."""
        tokens, block = sequence.tokens, self._kv.block_size
        other = None
        if num_hit:
            other = memory.having(hashes[num_hit // block - 1])
        else:
            root = salted_root(sequence.salt, sequence.adapter, sequence.weights)
            nearest = memory.nearest(root, tokens)
            other = nearest[0] if nearest is not None and nearest[1] >= min(ALIKE, block) else None
        at = None if other is None else first_difference(tokens, other.tokens, num_hit)
        if at is not None and any(i.start < at and num_hit < i.start + i.count for i in sequence.media):
            at = None  # only ids are remembered: another image may differ earlier
        if other is not None and at is not None:
            theirs = other.tokens[at : at + SHOWN].tobytes()
            return CacheMiss(reason="differs", position=at, theirs=theirs)
        if not num_hit and memory.under_another_salt(tokens, sequence.salt, sequence.client):
            return CacheMiss(reason="salt", position=0)
        return CacheMiss(reason="new", position=num_hit)
