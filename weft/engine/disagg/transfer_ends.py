"""The parts of an engine process between which ``EngineTransfers`` stands: the scheduler and the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from weft.engine.disagg.group_transfers import RankEvent
from weft.types import frames as f
from weft.types import transfer as r
from weft.types.messages import TokenEvent
from weft.types.transfer import Endpoint, GroupDims, TransferKey


class TransferScheduler(Protocol):
    """The transfer interface of ``weft.scheduler.scheduler.Scheduler``."""

    def transfer(self, event: r.TransferEvent, now: float) -> list[TokenEvent]: ...

    def transfer_requests(self) -> list[r.TransferRequest]: ...

    def transfer_blocks(self, key: TransferKey) -> tuple[r.Blocks, ...]: ...


class TransferRanks(Protocol):
    """The ranks of a group: see ``weft.engine.disagg.group_transfers.GroupTransfers``."""

    @property
    def dims(self) -> GroupDims: ...

    @property
    def ranks(self) -> range: ...

    @property
    def sockets(self) -> Sequence[Any]: ...

    def endpoints(self) -> tuple[Endpoint, ...] | None: ...

    def send(self, frame: f.TransferToRank) -> None: ...

    def take(self) -> list[RankEvent]: ...
