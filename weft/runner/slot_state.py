"""What the device knows of each slot: the truth that plans only bound from above.

``history`` holds every id of the sequence, prompt and output, the output written by sampling itself; so a
step can be launched before the one ahead of it was read, and a sequence that sat out any number of steps
still continues with its true last token. Positions and cache indices derive from ``num_computed`` here.

Owner: the runner, which applies a plan's ops before the plan's compute, on the same stream and thread.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig
from weft.ops.upload import upload
from weft.runner.media import Spans
from weft.types.plan import (
    AllocSlot,
    AppendBlocks,
    AppendEach,
    BindMedia,
    Export,
    FreeSlot,
    LoadState,
    OfNoSlot,
    Op,
    SaveState,
    Segment,
)

Tensor = torch.Tensor


class SlotState:
    """Per-slot tensors, preallocated for the whole life of the group.

    history       int32 [slots + 1, max_len + 1]; beyond a slot's known length its content is arbitrary
    num_computed  int64 [slots + 1]: positions whose cache is written
    num_prompt    int64 [slots + 1]
    live          int64 [slots + 1]: the copy of the recurrent state that holds for num_computed. Arbitrary at
                  position 0, where no state is read; ``LoadState`` and every step set it
    tables        for each cache kind, int32 [slots + 1, entries]: block ids, 0 beyond what was appended; no
                  entries for a state
    spans         where each slot's images are; None where positions do not count by them

    The last row, ``spare``, has no sequence and stays 0: what pads a step to a fixed number of rows names
    it, and computes token 0 at position 0 in the null block.
    """

    def __init__(self, kv: KVConfig, device: torch.device) -> None:
        slots = kv.num_slots + 1
        length = kv.max_model_len + 1
        self.history = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.num_prompt = torch.zeros(slots, dtype=torch.int64, device=device)
        self.live = torch.zeros(slots, dtype=torch.int64, device=device)
        entries = [0 if p.cache.kind == "state" else -(-length // p.block_size) + 1 for p in kv.pools]
        self.tables = tuple(torch.zeros(slots, n, dtype=torch.int32, device=device) for n in entries)
        media = kv.media
        has_spans = media is not None and media.sections
        self.spans = Spans(slots, media.most_items, device) if media is not None and has_spans else None
        self._block_sizes = tuple(pool.block_size for pool in kv.pools)
        # Host mirrors: the generation in each slot, and the length of its tables. Only for checks and
        # offsets.
        self._gen = np.zeros(kv.num_slots, np.int64)
        self._live = np.zeros(kv.num_slots, bool)
        self._entries = np.zeros((len(kv.pools), kv.num_slots), np.int64)
        self._covered: tuple[bytes, bytes, np.ndarray] | None = None
        """Of the segment validated last, if nothing has changed since: slots, generations, and the positions
        of each row that its block tables cover."""

    @property
    def num_slots(self) -> int:
        return len(self._live)

    @property
    def spare(self) -> int:
        """The row of no sequence."""
        return len(self._live)

    def clear(self) -> None:
        """Every slot is free. What its rows hold, the next sequence writes over."""
        self._live.fill(False)
        self._entries.fill(0)
        self._covered = None

    def apply(self, op: Op) -> None:
        """Carries out one op. Raises EngineDead when it contradicts the table (a diverged group)."""
        self._covered = None
        if isinstance(op, AppendEach):
            self._append_each(op)
            return
        if isinstance(op, OfNoSlot):  # of no slot
            return
        if not 0 <= op.slot < self.num_slots:
            raise EngineDead(f"step names slot {op.slot}, the table has {self.num_slots}")
        if isinstance(op, SaveState | LoadState | Export | BindMedia):  # carried out by others
            if not self._live[op.slot]:
                raise EngineDead(f"slot {op.slot} is named by a {type(op).__name__}, and is free")
        elif isinstance(op, AllocSlot):
            self._alloc(op)
        elif isinstance(op, FreeSlot):
            self._free(op)
        else:
            self._append(op)

    def _alloc(self, op: AllocSlot) -> None:
        if self._live[op.slot]:
            raise EngineDead(f"slot {op.slot} is allocated while generation {self._gen[op.slot]} is in it")
        known = len(op.token_ids)
        if not 0 < op.num_prompt <= known < self.history.shape[1] or not 0 <= op.num_cached < known:
            raise EngineDead(f"slot {op.slot} is allocated with lengths that cannot be")
        self._live[op.slot], self._gen[op.slot] = True, op.gen
        self._entries[:, op.slot] = 0
        self.history[op.slot, :known] = self._upload(op.token_ids)
        # Not ``x[slot] = number``: a GPU copies that from pageable memory, and the host waits for it.
        self.num_computed[op.slot].fill_(op.num_cached)
        self.num_prompt[op.slot].fill_(op.num_prompt)
        for table in self.tables:  # what a row is filled up with goes to the null block, not to a stranger's
            table[op.slot] = 0
        if self.spans is not None:
            self.spans.alloc(op.slot, op.spans)

    def rope_positions(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """``Spans.rope_positions``; None where positions do not count by images."""
        return None if self.spans is None else self.spans.rope_positions(slots, positions)

    def _free(self, op: FreeSlot) -> None:
        self._check(op.slot, op.gen)
        self._live[op.slot] = False

    def _append(self, op: AppendBlocks) -> None:
        if not self._live[op.slot]:
            raise EngineDead(f"blocks are appended to slot {op.slot}, which is free")
        at = int(self._entries[op.kind, op.slot])
        end = at + len(op.blocks)
        table = self.tables[op.kind]
        if end > table.shape[1]:
            raise EngineDead(f"the block table of slot {op.slot} overflows")
        table[op.slot, at:end] = self._upload(op.blocks)
        self._entries[op.kind, op.slot] = end

    def _append_each(self, op: AppendEach) -> None:
        slots = op.slots.astype(np.int64)
        if slots.min() < 0 or slots.max() >= self.num_slots or len(np.unique(slots)) != len(slots):
            raise EngineDead("blocks are appended to slots outside the table, or twice to one")
        if not self._live[slots].all():
            raise EngineDead("blocks are appended to a slot that is free")
        table = self.tables[op.kind]
        at = self._entries[op.kind, slots]
        if at.max() >= table.shape[1]:
            raise EngineDead("the block table of a slot overflows")
        where = upload(np.stack([slots, at, op.blocks]), table.device)  # one copy for all three
        table[where[0], where[1]] = where[2].int()
        self._entries[op.kind, slots] = at + 1

    def advance(self, slots: Tensor, counts: Tensor, accepted: Tensor | None, *, moves: bool) -> None:
        """A step has computed ``counts`` positions of each of ``slots``, int64 [rows].

        accepted: int64 [decode rows], the last of the rows: drafts that were right, where a row had any; what
        was computed of the others is not counted. None: no row had drafts. With ``moves`` the recurrent state
        that holds is the one of the last position that counts.
        """
        if accepted is not None:
            first = len(slots) - len(accepted)
            counts = torch.cat([counts[:first], accepted + 1])
        self.num_computed.index_add_(0, slots, counts)
        if not moves:
            return
        if accepted is None:
            self.live.index_fill_(0, slots, 0)
        else:
            self.live.index_copy_(0, slots, torch.nn.functional.pad(accepted, (first, 0)))

    def draft(self, slots: Tensor, ends: Tensor, drafts: Tensor, next_k: np.ndarray) -> None:
        """Puts ``drafts`` [rows with next_k > 0, most] behind the newest token, at ``ends``, of those slots.

        slots, ends: int64 [rows]. Behind a row's own drafts the history is arbitrary, so all may be written.
        """
        rows = np.flatnonzero(next_k)
        if len(rows) < len(next_k):
            at = upload(rows, slots.device)
            slots = slots[at]
            ends = ends[at]
        places = ends.unsqueeze(1) + torch.arange(1, drafts.shape[1] + 1, device=slots.device)
        # The last place of a row is no position.
        places.clamp_(max=self.history.shape[1] - 1)
        self.history[slots.unsqueeze(1), places] = drafts.to(self.history.dtype)

    def _upload(self, column: np.ndarray) -> Tensor:
        return upload(np.array(column, dtype=np.int32), self.history.device)

    def _check(self, slot: int, gen: int) -> None:
        if not self._live[slot] or self._gen[slot] != gen:
            raise EngineDead(f"slot {slot} is named with generation {gen}, which is not in it")

    def validate(self, segment: Segment) -> None:
        """Before anything is launched: every row names a live sequence whose tables cover its positions, and
        those of its next drafts."""
        if not segment.rows:
            return
        ends = segment.start.astype(np.int64) + segment.count + segment.next_k
        if (ends > self._covers(segment)).any():
            raise EngineDead("a row's positions lie beyond its block table")

    def _covers(self, segment: Segment) -> np.ndarray:
        """How many positions of each row its block tables cover. Raises EngineDead unless every row names a
        live sequence."""
        names = segment.slot.tobytes(), segment.gen.tobytes()
        if self._covered is not None and self._covered[:2] == names:
            return self._covered[2]
        slots = segment.slot
        if slots.min() < 0 or slots.max() >= self.num_slots:
            raise EngineDead("a row names a slot outside the table")
        if not self._live[slots].all() or (self._gen[slots] != segment.gen).any():
            raise EngineDead("a row names a slot without its sequence")
        covers = np.full(len(slots), np.iinfo(np.int64).max)
        for table, entries, size in zip(self.tables, self._entries, self._block_sizes, strict=True):
            if table.shape[1]:
                covers = np.minimum(covers, entries[slots] * size)
        self._covered = *names, covers
        return covers
