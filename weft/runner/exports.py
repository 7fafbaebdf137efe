"""Which positions of which layers may leave for other groups, told as a step computes them.

    plan with Export      blocks of the sequence, before the pass
    behind layers         their entries of positions 0 .. end - 1 are there (small layers are told together)
    behind the drafts     so are those of the layers that make them
    Export with states    the snapshots that the plan's SaveState made are there

Positions that were in the caches when the sequence came are told with the first of its rows: by then whatever
makes them has run, in the order of steps. ``Pushes`` tells old positions from new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from weft.common.errors import EngineDead, ErrorInfo
from weft.config.resolved import KVConfig, PoolSpec
from weft.transfer.events import RankReport, RankStopped
from weft.types.plan import Export, Op, StepPlan
from weft.types.rooms import Admitted, Blocks, Bound, Endpoint, GroupDims, RoomKey

if TYPE_CHECKING:
    import torch

ENOUGH = 4 << 20
"""Bytes of a row's layers that are told of at once. Each telling costs the thread that computes its lock, and
the transfers a write, whatever its size."""
LayerDone: TypeAlias = Callable[[int], None]
"""Called with a layer's number when all that a pass writes to its caches is there."""


class Transfer(Protocol):
    """What a rank and its head ask of the rank's transfers: the contract of
    ``weft.transports.worker.RankTransfer``. Nothing waits but ``stop_all``."""

    @property
    def dims(self) -> GroupDims: ...

    @property
    def failure(self) -> Exception | None: ...

    def begin(
        self, offer: Admitted, bound: Bound, blocks: tuple[Blocks, ...], num_cached: int = 0
    ) -> None: ...

    def grow(self, key: RoomKey, blocks: tuple[Blocks, ...]) -> None: ...

    def computed(self, key: RoomKey, layers: tuple[int, ...], begin: int, end: int) -> None: ...

    def fail(self, key: RoomKey, error: ErrorInfo) -> None: ...

    def expect(self, offer: Admitted, bound: Bound) -> None: ...

    def stop(self, key: RoomKey) -> None: ...

    def stop_all(self) -> None: ...


class Reports(Protocol):
    """What a rank's transfers have told: the contract of ``weft.transports.reports.RoomReports``."""

    @property
    def descriptor(self) -> int: ...

    def take(self) -> list[RankReport | RankStopped]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRooms:
    """What a rank moves caches between groups with. Owned by its runner."""

    transfer: Transfer
    reports: Reports
    endpoint: Endpoint
    """Where peers reach this rank."""
    memory: Sequence[Sequence[torch.Tensor]]
    """For each cache kind the tensors that peers read or write: blocks, or the snapshots of a state."""
    heard: bool = False
    """Whether a head is on this rank that must hear of rooms while a step computes."""
    close: Callable[[], None]
    """Ends all of it."""


def is_heard(rooms: RankRooms | None) -> bool:
    """``RankRooms.heard``, of a rank that may have none."""
    return rooms is not None and rooms.heard


class Exports:
    """Tells ``transfer`` of the plans of one runner, from the thread that computes them."""

    def __init__(self, kv: KVConfig, model_layers: int, dtype: str, transfer: Transfer) -> None:
        """``model_layers``: further layers of the caches are a drafter's."""
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
        """Of each layer of the model with entries, what a position takes."""
        self._last = max(self._bytes_of, default=0)
        self._drafters = tuple(sorted(bytes_of.keys() - self._bytes_of.keys()))

    def begin(self, ops: Sequence[Op]) -> LayerDone | None:
        """Before a step's rows, when its ops are carried out. What is to be called behind each layer; None:
        nobody waits for any."""
        rows = []
        for op in ops:
            if isinstance(op, Export):
                self._transfer.grow(op.key, op.blocks)
                if op.states:
                    self._transfer.computed(op.key, self._states, 0, op.end)
                else:
                    rows.append(_Leaving(op))
        if not rows:
            return None

        def done(layer: int) -> None:
            size = self._bytes_of.get(layer)
            if size is None:
                return
            for row in rows:
                row.layers += (layer,)
                row.nbytes += size * (row.op.end - row.op.start)
                if row.nbytes >= ENOUGH or layer == self._last:
                    self._transfer.computed(row.op.key, row.layers, 0, row.op.end)
                    row.layers, row.nbytes = (), 0

        return done

    def drafted(self, plan: StepPlan) -> None:
        """The drafter has made all entries of the positions of ``plan`` that are exported."""
        for op in exported(plan.ops) if self._drafters else ():
            self._transfer.computed(op.key, self._drafters, 0, op.end)


@dataclass(slots=True)
class _Leaving:
    """A row that is exported, in a pass."""

    op: Export
    layers: tuple[int, ...] = ()
    """Passed, and not told."""
    nbytes: int = 0
    """Of the row in these."""


def _position_bytes(pool: PoolSpec, dtype: str) -> int:
    """What a position takes in one layer of a kind."""
    blocks = pool.num_blocks + 1  # and the null block
    return pool.nbytes(dtype) // (blocks * pool.block_size * len(pool.cache.layers))


def exported(ops: Sequence[Op]) -> list[Export]:
    """The ``Export`` ops that are about rows of their own plan."""
    return [op for op in ops if isinstance(op, Export) and not op.states]
