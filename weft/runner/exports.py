"""Which positions of which layers may leave for other groups, told as a step computes them.

    plan with Export      blocks of the sequence, before the pass
    behind each layer     its entries of positions 0 .. end - 1 are there
    behind the drafts     so are those of the layers that make them
    Export with states    the snapshots that the plan's SaveState made are there

Positions that were in the caches when the sequence came are told with the first of its rows: by then whatever
makes them has run, in the order of steps. Who takes note tells old from new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig
from weft.transfer.words import RankReport, RankStopped
from weft.types.plan import Export, Op, StepPlan
from weft.types.rooms import Admitted, Blocks, Bound, Endpoint, GroupDims, RoomKey

LayerDone: TypeAlias = Callable[[int], None]
"""Called with a layer's number when all that a pass writes to its caches is there."""


class Transfer(Protocol):
    """What a rank and its head ask of the rank's transfers: the contract of
    ``weft.transports.worker.RankTransfer``. Nothing waits."""

    @property
    def dims(self) -> GroupDims: ...

    def begin(
        self, offer: Admitted, bound: Bound, blocks: tuple[Blocks, ...], num_cached: int = 0
    ) -> None: ...

    def grow(self, key: RoomKey, blocks: tuple[Blocks, ...]) -> None: ...

    def computed(self, key: RoomKey, layer: int, begin: int, end: int) -> None: ...

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
    close: Callable[[], None]
    """Ends all of it."""


class Exports:
    """Tells ``transfer`` of the plans of one runner, from the thread that computes them."""

    def __init__(self, kv: KVConfig, model_layers: int, transfer: Transfer) -> None:
        """``model_layers``: further layers of the caches are a drafter's."""
        self._transfer = transfer
        states = {layer for pool in kv.pools if pool.cache.kind == "state" for layer in pool.cache.layers}
        entries = {layer for pool in kv.pools if pool.cache.kind != "state" for layer in pool.cache.layers}
        if states & entries:
            raise EngineDead(f"layers {sorted(states & entries)} have both a state and entries")
        self._states = sorted(states)
        self._entries = frozenset(layer for layer in entries if layer < model_layers)
        self._drafters = sorted(layer for layer in entries if layer >= model_layers)

    def begin(self, ops: Sequence[Op]) -> LayerDone | None:
        """Before a step's rows, when its ops are carried out. What is to be called behind each layer; None:
        nobody waits for any."""
        rows = []
        for op in ops:
            if isinstance(op, Export):
                self._transfer.grow(op.key, op.blocks)
                if op.states:
                    for layer in self._states:
                        self._transfer.computed(op.key, layer, 0, op.end)
                else:
                    rows.append(op)
        if not rows:
            return None

        def done(layer: int) -> None:
            if layer in self._entries:
                for op in rows:
                    self._transfer.computed(op.key, layer, 0, op.end)

        return done

    def drafted(self, plan: StepPlan) -> None:
        """The drafter has made all entries of the positions of ``plan`` that are exported."""
        for op in exported(plan.ops) if self._drafters else ():
            for layer in self._drafters:
                self._transfer.computed(op.key, layer, 0, op.end)


def exported(ops: Sequence[Op]) -> list[Export]:
    """Those that are about rows of the same plan."""
    return [op for op in ops if isinstance(op, Export) and not op.states]
