"""Exports: notifies transfers which positions of which layers may leave, as a step computes the positions.

    plan with Export      block ids of the sequence, before the forward pass
    behind layers         entries of positions 0 .. end - 1 are complete (small layers share one notification)
    behind the drafts     entries of the drafter's layers are complete
    Export with states    the snapshots of the plan's SaveState updates are complete

Positions cached before the admission of a sequence are reported with the first exported row: step order
guarantees that earlier steps have written these positions. ``Pushes`` separates old positions from new
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from weft.common.errors import EngineDead, ErrorInfo
from weft.config.resolved import KVConfig, PoolSpec
from weft.disagg.protocol.transfer_events import RankReport, RankStopped
from weft.types.plan import Export, SlotUpdate, StepPlan
from weft.types.transfer import Admitted, Blocks, Bound, Endpoint, GroupDims, TransferKey

if TYPE_CHECKING:
    import torch

ENOUGH = 4 << 20
"""Minimum bytes of a row's layers per notification. A notification costs the compute thread a lock and the
transfer a write, whatever its size."""
LayerDone: TypeAlias = Callable[[int], None]
"""Called with the number of a layer when the forward pass has written all cache entries of the layer."""


class TransferThread(Protocol):
    """Transfers of a rank, as used by the rank and its engine process. Contract of
    ``weft.disagg.transport.transfer_thread.RankTransfer``. Only ``stop_all`` blocks."""

    @property
    def dims(self) -> GroupDims: ...

    @property
    def failure(self) -> Exception | None: ...

    def begin(
        self, offer: Admitted, bound: Bound, blocks: tuple[Blocks, ...], num_cached: int = 0
    ) -> None: ...

    def grow(self, key: TransferKey, blocks: tuple[Blocks, ...]) -> None: ...

    def computed(self, key: TransferKey, layers: tuple[int, ...], begin: int, end: int) -> None: ...

    def fail(self, key: TransferKey, error: ErrorInfo) -> None: ...

    def expect(self, offer: Admitted, bound: Bound) -> None: ...

    def stop(self, key: TransferKey) -> None: ...

    def stop_all(self) -> None:
        """Stop all transfers and wait until the rank touches no memory of the transfers. Raises EngineDead
        after a time-out.
        """


class Reports(Protocol):
    """Reports of a rank's transfers. Contract of ``weft.disagg.transport.reports.TransferReports``."""

    @property
    def descriptor(self) -> int: ...

    def take(self) -> list[RankReport | RankStopped]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTransfers:
    """Transfer parts of one rank. The runner of the rank owns and closes them."""

    transfer: TransferThread
    reports: Reports
    endpoint: Endpoint
    """Address at which peers reach this rank."""
    memory: Sequence[Sequence[torch.Tensor]]
    """Per KV cache group, the tensors that peers read or write: blocks, or the snapshots of a state."""
    reports_during_steps: bool = False
    """True if the engine process on this rank must receive transfer reports while a step computes."""
    close: Callable[[], None]
    """Closes all parts."""


class Exports:
    """Notifies ``transfer`` about the plans of one runner. Used from the compute thread."""

    def __init__(self, kv: KVConfig, model_layers: int, dtype: str, transfer: TransferThread) -> None:
        """``model_layers``: number of layers of the model; further cache layers belong to a drafter.

        Raises EngineDead if a layer has both a recurrent state and cache entries.
        """
        self._transfer = transfer
        states = {layer for pool in kv.pools if pool.cache.kind == "state" for layer in pool.cache.layers}
        bytes_of: dict[int, int] = {}
        for pool in kv.pools:
            for layer in pool.cache.layers if pool.cache.kind != "state" else ():
                bytes_of[layer] = bytes_of.get(layer, 0) + _position_bytes(pool, dtype)
        if states & bytes_of.keys():
            raise EngineDead(f"layers {sorted(states & bytes_of.keys())} have both a state and entries")
        self._states = tuple(sorted(states))
        self._bytes_of = {layer: size for layer, size in bytes_of.items() if layer < model_layers}
        """Bytes per position, for each layer of the model with cache entries."""
        self._last = max(self._bytes_of, default=0)
        self._drafters = tuple(sorted(bytes_of.keys() - self._bytes_of.keys()))

    def begin(self, ops: Sequence[SlotUpdate]) -> LayerDone | None:
        """Process the Export updates of a step before its rows run. Return the hook to call after each layer;
        None if no row of the step is exported."""
        rows = []
        for op in ops:
            if isinstance(op, Export):
                # Block ids must reach the transfer before any notification about their positions.
                self._transfer.grow(op.key, op.blocks)
                if op.states:
                    self._transfer.computed(op.key, self._states, 0, op.end)
                else:
                    rows.append(_ExportedRow(op))
        if not rows:
            return None

        def done(layer: int) -> None:
            size = self._bytes_of.get(layer)
            if size is None:
                return
            for row in rows:
                # Collect small layers, and notify the transfer once for many bytes or behind the last layer.
                row.layers += (layer,)
                row.nbytes += size * (row.op.end - row.op.start)
                if row.nbytes >= ENOUGH or layer == self._last:
                    self._transfer.computed(row.op.key, row.layers, 0, row.op.end)
                    row.layers, row.nbytes = (), 0

        return done

    def drafted(self, plan: StepPlan) -> None:
        """Notify the transfer that the drafter's entries of the exported positions of ``plan`` are
        complete."""
        for op in exported(plan.ops) if self._drafters else ():
            self._transfer.computed(op.key, self._drafters, 0, op.end)


@dataclass(slots=True)
class _ExportedRow:
    """An exported row within one forward pass."""

    op: Export
    layers: tuple[int, ...] = ()
    """Layers computed but not yet reported."""
    nbytes: int = 0
    """Bytes of the row in ``layers``."""


def _position_bytes(pool: PoolSpec, dtype: str) -> int:
    """Return the bytes of one position in one layer of a KV cache group."""
    blocks = pool.num_blocks + 1  # and the null block
    return pool.nbytes(dtype) // (blocks * pool.block_size * len(pool.cache.layers))


def exported(ops: Sequence[SlotUpdate]) -> list[Export]:
    """Return the ``Export`` updates for rows of their own plan."""
    return [op for op in ops if isinstance(op, Export) and not op.states]
