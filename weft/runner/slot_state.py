"""Slot state on the device: the true ids and lengths, and recurrent states. Plans only hold upper bounds.

``history`` contains every id of a sequence, prompt and output. Sampling writes the output ids. So a step can
be launched before the previous step was read, and a sequence continues with its true last token after any
number of steps without a row. Positions and cache indices derive from ``num_computed``.

Owner: the runner. The runner applies the slot updates of a plan before the computation of the plan, on the
same stream and thread.

``States`` copies recurrent states between slots and snapshots: executes ``SaveState`` and ``LoadState``.

    slots        [layers, slots + 1, copies, *shape]    per part of each state group; layers use the slots
    snapshots    [layers, 1 + blocks, *shape]           used by this module only

Copies are batched over layers, and on a GPU also over rows: a few launches for any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig
from weft.ops.upload import upload
from weft.runner.images.image_store import EmbeddingSpans
from weft.runner.kv_tensors import snapshots
from weft.types.plan import (
    AllocSlot,
    AppendBlocks,
    AppendEach,
    BindMedia,
    Export,
    FreeSlot,
    LoadState,
    SaveState,
    Segment,
    SlotlessUpdate,
    SlotUpdate,
)

Tensor = torch.Tensor


class SlotState:
    """Tensors per slot, allocated once for the lifetime of the group.

    history       int32 [slots + 1, max_len + 1]; content beyond the known length of a slot is arbitrary
    num_computed  int64 [slots + 1]: number of positions in the cache
    num_prompt    int64 [slots + 1]
    places        int32 [slots + 1]: place of the LoRA adapter; -1 for the model alone
    live          int64 [slots + 1]: copy of the recurrent state after num_computed positions. Arbitrary at
                  position 0, where no state is read; ``LoadState`` and every step set the value
    tables        per KV cache group, int32 [slots + 1, entries]: block ids, 0 beyond the appended blocks;
                  0 entries for a state
    spans         positions of images per slot; None unless positions count by images

    The last row, ``spare``, has no sequence and stays 0. Padding rows of a step name the spare row, and
    compute token 0 at position 0 in the null block.
    """

    def __init__(self, kv: KVConfig, device: torch.device) -> None:
        slots = kv.num_slots + 1
        length = kv.max_model_len + 1
        self.history = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.num_prompt = torch.zeros(slots, dtype=torch.int64, device=device)
        self.places = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self.live = torch.zeros(slots, dtype=torch.int64, device=device)
        entries = [0 if p.cache.kind == "state" else -(-length // p.block_size) + 1 for p in kv.pools]
        self.tables = tuple(torch.zeros(slots, n, dtype=torch.int32, device=device) for n in entries)
        media = kv.media
        has_spans = media is not None and media.sections
        self.spans = (
            EmbeddingSpans(slots, media.most_items, device) if media is not None and has_spans else None
        )
        self._block_sizes = tuple(pool.block_size for pool in kv.pools)
        # Host mirrors for checks and offsets: place, generation and table length of each slot.
        self._places = np.full(slots, -1, np.int32)
        self._adapted = set[int]()
        """Slots in use that have the place of an adapter. A free slot keeps its place in ``places``."""
        self._gen = np.zeros(kv.num_slots, np.int64)
        self._live = np.zeros(kv.num_slots, bool)
        self._entries = np.zeros((len(kv.pools), kv.num_slots), np.int64)
        self._appended: dict[int, list[np.ndarray]] = {}
        """By KV cache group: int64 [2, n], flat indices of the group's table and block ids, of updates that
        the next upload of the step carries to a GPU."""
        self._defers = device.type == "cuda"
        self._covered: tuple[tuple[np.ndarray, ...], np.ndarray] | None = None
        """Columns of the last validated segment except the starts, and the largest valid start of each row.
        None after any slot update."""

    @property
    def num_slots(self) -> int:
        return len(self._live)

    @property
    def spare(self) -> int:
        """Index of the row without a sequence."""
        return len(self._live)

    @property
    def most_appended(self) -> int:
        """Most numbers in the columns of ``appended`` if each slot gets two blocks per KV cache group."""
        return 2 * 2 * self.num_slots * len(self.tables) if self._defers else 0

    def clear(self) -> None:
        """Free every slot. The next sequence of a slot overwrites the contents."""
        self._appended.clear()
        self._adapted.clear()
        self._live.fill(False)
        self._entries.fill(0)
        self._covered = None

    def apply(self, op: SlotUpdate) -> None:
        """Apply one slot update; updates of other parts are only checked. Raises EngineDead if the update
        contradicts the table (a diverged group)."""
        self._covered = None
        if isinstance(op, AppendEach):
            self._append_each(op)
            return
        if isinstance(op, SlotlessUpdate):
            return
        if isinstance(op, AllocSlot | AppendBlocks):
            self.flush()  # such an update may write the same entries of a table, and comes later
        if not 0 <= op.slot < self.num_slots:
            raise EngineDead(f"step names slot {op.slot}, the table has {self.num_slots}")
        if isinstance(op, SaveState | LoadState | Export | BindMedia):  # applied by other parts
            if not self._live[op.slot]:
                raise EngineDead(f"slot {op.slot} is named by a {type(op).__name__}, and is free")
        elif isinstance(op, AllocSlot):
            self._alloc(op)
        elif isinstance(op, FreeSlot):
            self._free(op)
        else:
            self._append(op)

    def _alloc(self, op: AllocSlot) -> None:
        """Put a sequence into a free slot: write its ids, lengths and image spans, and clear its block
        tables. Raises EngineDead if the slot is in use or the lengths are invalid."""
        if self._live[op.slot]:
            raise EngineDead(f"slot {op.slot} is allocated while generation {self._gen[op.slot]} is in it")
        known = len(op.token_ids)
        if not 0 < op.num_prompt <= known < self.history.shape[1] or not 0 <= op.num_cached < known:
            raise EngineDead(f"slot {op.slot} is allocated with invalid lengths")
        self._live[op.slot], self._gen[op.slot] = True, op.gen
        if self._places[op.slot] != op.adapter:
            self._places[op.slot] = op.adapter
            self.places[op.slot].fill_(op.adapter)
        if op.adapter >= 0:
            self._adapted.add(op.slot)
        self._entries[:, op.slot] = 0
        self.history[op.slot, :known] = self._upload(op.token_ids)
        # Not ``x[slot] = number``: on a GPU the number would be copied from pageable memory, and the host
        # would wait.
        self.num_computed[op.slot].fill_(op.num_cached)
        self.num_prompt[op.slot].fill_(op.num_prompt)
        for table in self.tables:  # padding must write to the null block, not to another sequence's block
            table[op.slot] = 0
        if self.spans is not None:
            self.spans.alloc(op.slot, op.spans)

    def rope_positions(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """Return ``EmbeddingSpans.rope_positions``; None if positions do not count by images."""
        return None if self.spans is None else self.spans.rope_positions(slots, positions)

    def adapters(self, *slots: np.ndarray) -> tuple[int, ...]:
        """Return the different places of the adapters of ``slots``, ascending. () for the model alone."""
        if not self._adapted:
            return ()
        places = [self._places[some] for some in slots if len(some)]
        if not places:
            return ()
        return tuple(int(place) for place in np.unique(np.concatenate(places)) if place >= 0)

    def _free(self, op: FreeSlot) -> None:
        self._check(op.slot, op.gen)
        self._live[op.slot] = False
        self._adapted.discard(op.slot)

    def _append(self, op: AppendBlocks) -> None:
        """Append block ids to a block table of a slot. Raises EngineDead for a free slot or a full table."""
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
        """Append one block to the tables of several slots. Raises EngineDead for a slot outside the table, a
        slot named twice, a free slot or a full table."""
        slots = op.slots.astype(np.int64)
        if slots.min() < 0 or slots.max() >= self.num_slots or len(np.unique(slots)) != len(slots):
            raise EngineDead("blocks are appended to slots outside the table, or twice to one")
        if not self._live[slots].all():
            raise EngineDead("blocks are appended to a slot that is free")
        table = self.tables[op.kind]
        at = self._entries[op.kind, slots]
        if at.max() >= table.shape[1]:
            raise EngineDead("the block table of a slot overflows")
        # No slot is named twice, so one scatter writes all entries.
        flat = np.stack([slots * table.shape[1] + at, op.blocks])
        self._entries[op.kind, slots] = at + 1
        self._appended.setdefault(op.kind, []).append(flat)
        if not self._defers:
            self.flush()

    def appended(self) -> list[np.ndarray]:
        """Return the blocks that ``AppendEach`` updates have appended and no upload has carried yet: for each
        KV cache group with such blocks, two int64 columns for ``write_appended``."""
        return [column for parts in self._appended.values() for column in np.concatenate(parts, axis=1)]

    def write_appended(self, columns: Sequence[Tensor]) -> None:
        """Write the blocks of ``appended`` into the block tables. ``columns``: the result of ``appended``, on
        the device."""
        for number, kind in enumerate(self._appended):
            where, blocks = columns[2 * number : 2 * number + 2]
            # The low half of each little-endian int64 is the int32 block id: no conversion is launched.
            self.tables[kind].view(-1).index_copy_(0, where, blocks.view(torch.int32)[::2])
        self._appended.clear()

    def flush(self) -> None:
        """Write the appended blocks now, with a separate upload."""
        if columns := self.appended():
            staged = upload(np.concatenate(columns), self.history.device)
            self.write_appended(staged.split([len(column) for column in columns]))

    def advance(self, slots: Tensor, counts: Tensor, accepted: Tensor | None, *, moves: bool) -> None:
        """Advance slots after a step. slots, counts: int64 [rows], positions computed per row.

        accepted: int64 [decode rows], accepted drafts of the last rows; positions of rejected drafts do not
        count. None: no row had drafts. With ``moves``, ``live`` selects the recurrent state after the last
        counted position.
        """
        if accepted is not None:
            # Decode rows come last. A decode row counts its newest token and the accepted drafts.
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
        """Write ``drafts`` [rows with next_k > 0, most] behind the newest token of each such row, at
        ``ends``.

        slots, ends: int64 [rows]. History behind the drafts of a row is arbitrary, so padding may be written
        too.
        """
        rows = np.flatnonzero(next_k)
        if len(rows) < len(next_k):
            at = upload(rows, slots.device)
            slots = slots[at]
            ends = ends[at]
        # [rows, most]
        places = ends.unsqueeze(1) + torch.arange(1, drafts.shape[1] + 1, device=slots.device)
        # The last column of the history is no position: writes beyond the longest sequence end up there.
        places.clamp_(max=self.history.shape[1] - 1)
        self.history[slots.unsqueeze(1), places] = drafts.to(self.history.dtype)

    def _upload(self, column: np.ndarray) -> Tensor:
        return upload(np.array(column, dtype=np.int32), self.history.device)

    def _check(self, slot: int, gen: int) -> None:
        if not self._live[slot] or self._gen[slot] != gen:
            raise EngineDead(f"slot {slot} is named with generation {gen}, but has another sequence or none")

    def validate(self, segment: Segment) -> None:
        """Check a segment before anything is launched. Raises EngineDead unless every row names a live
        sequence and the block tables cover the positions of the row and of its next drafts."""
        if segment.rows and (segment.start > self._last_starts(segment)).any():
            raise EngineDead("a row's positions lie beyond its block table")

    def _last_starts(self, segment: Segment) -> np.ndarray:
        """Return int64 [rows]: the largest start of each row at which the block tables cover the row and its
        next drafts. Raises EngineDead unless every row names a live sequence."""
        # Decode steps often repeat the rows of the previous step; without slot updates between, the answer is
        # the same.
        columns = segment.slot, segment.gen, segment.count, segment.next_k
        if self._covered is not None and all(map(_equal, self._covered[0], columns)):
            return self._covered[1]
        slots = segment.slot
        if slots.min() < 0 or slots.max() >= self.num_slots:
            raise EngineDead("a row names a slot outside the table")
        if not self._live[slots].all() or (self._gen[slots] != segment.gen).any():
            raise EngineDead("a row names a slot without its sequence")
        covers = np.full(len(slots), np.iinfo(np.int64).max)
        for table, entries, size in zip(self.tables, self._entries, self._block_sizes, strict=True):
            if table.shape[1]:
                covers = np.minimum(covers, entries[slots] * size)
        starts = covers - segment.count - segment.next_k
        self._covered = columns, starts
        return starts


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one is other or one.tobytes() == other.tobytes()


PASSING_BYTES = 64 << 20
"""Maximum bytes of the buffer between source and destination in one batch of copies. The buffer is needed
because row indices are known on the device only."""


class _Kind:
    """One state group: slots and snapshots of each part, both ``[layers, rows, elements]``."""

    def __init__(self, slots: Sequence[Tensor], snapshots: Sequence[Tensor]) -> None:
        """``slots``: [layers, slots + 1, copies, ...] of each state tensor. ``snapshots``: [layers, blocks +
        1, ...]. Both are kept as flat views."""
        self.copies = slots[0].shape[2]
        self.num_slots = slots[0].shape[1] - 1
        self.num_blocks = snapshots[0].shape[1] - 1
        self.batched = slots[0].device.type != "cpu"
        """True to copy all rows at once through a buffer (GPU); False to copy row by row, ten times as fast
        on a CPU."""
        self.slots = [part.view(part.shape[0], part.shape[1] * part.shape[2], -1) for part in slots]
        self.snapshots = [part.flatten(2) for part in snapshots]

    def copy(self, ends: Sequence[tuple[Tensor, Tensor]], to: Tensor, rows: Tensor) -> None:
        """Copy row ``rows[i]`` to row ``to[i]`` for each (source, destination) of ``ends``. to, rows: int64
        [n]."""
        if not self.batched:
            for begin, end in zip(rows.tolist(), to.tolist(), strict=True):
                for source, destination in ends:
                    destination[:, end].copy_(source[:, begin])
            return
        for source, destination in ends:
            row = source.shape[0] * source.shape[2] * source.itemsize
            most = max(1, PASSING_BYTES // max(row, 1))
            for begin in range(0, len(to), most):
                part = slice(begin, begin + most)
                destination.index_copy_(1, to[part], source.index_select(1, rows[part]))


class States:
    """Snapshots of every state group, and copies between snapshots and slots.

    Owner: the runner. The runner applies a plan's updates before the computation, on the stream of the
    compute.
    """

    def __init__(
        self,
        kv: KVConfig,
        memory: Sequence[Sequence[Tensor]],
        live: Tensor,
        dtype: torch.dtype,
        blocks: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """``memory``: tensors of each KV cache group over all layers, from ``kv_tensors.stacked``. ``live``:
        int64 [slots + 1], the valid state copy of each slot. ``dtype``: dtype of the model. ``blocks``:
        snapshot memory per group, if allocated elsewhere."""
        self._live = live
        self._kinds = {
            number: _Kind(
                memory[number], blocks[number] if blocks is not None else snapshots(pool, dtype, live.device)
            )
            for number, pool in enumerate(kv.pools)
            if pool.cache.kind == "state"
        }

    def snapshots(self, kind: int) -> Sequence[Tensor]:
        """Return the snapshots of a state group, per part ``[layers, 1 + blocks, elements]``. For tests."""
        return self._kinds[kind].snapshots

    def apply(self, ops: Iterable[SlotUpdate]) -> None:
        """Execute the ``SaveState`` and ``LoadState`` updates of a plan, in order.

        No other update changes a state, so the other updates may run earlier. Raises EngineDead for an
        invalid update.
        """
        if not self._kinds:
            return
        # Consecutive updates of one type and group become one batch.
        run: list[SaveState | LoadState] = []
        for op in ops:
            if isinstance(op, SaveState | LoadState):
                if run and not _together(run[-1], op):
                    self._carry_out(run)
                    run = []
                run.append(op)
        if run:
            self._carry_out(run)

    def _carry_out(self, run: list[SaveState | LoadState]) -> None:
        """Copy states for ``run``, updates of one type and one state group; a load also makes copy 0 live.
        Raises EngineDead for an invalid slot, block or copy, or for two copies to one place."""
        kind = self._kinds.get(run[0].kind)
        if kind is None:
            raise EngineDead(f"step copies a state of KV cache group {run[0].kind}, which has none")
        columns = np.array([(op.slot, op.block, getattr(op, "back", 0)) for op in run], np.int64).T.copy()
        slots, blocks, back = columns
        if slots.min() < 0 or slots.max() >= kind.num_slots:
            raise EngineDead("step copies a state of a slot outside the table")
        if blocks.min() < 1 or blocks.max() > kind.num_blocks or back.min() < 0 or back.max() >= kind.copies:
            raise EngineDead("step copies a state from or to an invalid block or copy")
        save = isinstance(run[0], SaveState)
        # Two copies to one place in one batch would have no defined order.
        if len(np.unique(blocks if save else slots)) != len(run):
            raise EngineDead("step copies two states to one place")
        slot, block, behind = upload(columns, self._live.device)
        if save:
            # [n]: flat rows (slot, copy). ``back`` counts from the live copy towards older positions.
            rows = slot * kind.copies + self._live[slot] - behind
            kind.copy(list(zip(kind.slots, kind.snapshots, strict=True)), block, rows)
        else:
            self._live.index_fill_(0, slot, 0)  # assignment by index would copy the number and wait
            kind.copy(list(zip(kind.snapshots, kind.slots, strict=True)), slot * kind.copies, block)


def _together(one: SaveState | LoadState, other: SaveState | LoadState) -> bool:
    return type(one) is type(other) and one.kind == other.kind
