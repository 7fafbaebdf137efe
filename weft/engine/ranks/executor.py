"""The interface of a rank's runner, as seen by the rank's group."""

from __future__ import annotations

import zlib
from typing import Protocol

from weft.config.resolved import KVConfig
from weft.engine.weights.rank_weights import RankWeights
from weft.models.adapters import Adapters
from weft.runner.exports import RankTransfers, Reports, TransferThread
from weft.runner.graphs.graphs import DecodeGraphs
from weft.runner.step_handle import StepHandle
from weft.speculation.base import Drafter
from weft.types.frames import Cache
from weft.types.plan import StepPlan, StepResult, TokenMasks
from weft.types.transfer import Endpoint


class RankRunner(Protocol):
    """Executes plans on one rank. ``weft.runner.runner.Runner`` documents the methods."""

    @property
    def kv(self) -> KVConfig: ...

    @property
    def graphs(self) -> DecodeGraphs | None: ...

    @property
    def drafter(self) -> Drafter | None: ...

    @property
    def varying(self) -> tuple[str, ...]: ...

    @property
    def adapters(self) -> Adapters | None: ...

    @property
    def transfer(self) -> TransferThread | None: ...

    @property
    def reports(self) -> Reports | None: ...

    @property
    def endpoint(self) -> Endpoint | None: ...

    @property
    def weights(self) -> RankWeights | None: ...

    @property
    def embeddings(self) -> RankTransfers | None: ...

    def forward(self, plan: StepPlan) -> StepHandle: ...

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None: ...

    def read(self, handle: StepHandle) -> StepResult: ...

    def done(self, handle: StepHandle) -> bool: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


def checksum(result: StepResult) -> int:
    """Return a 32-bit checksum of a step's tokens, accepted drafts, new drafts and failed rows. All ranks of
    a group must have the same checksum. Logprobs do not count."""
    made = 0
    for column in (result.tokens, result.accepted, result.drafts):
        made = zlib.crc32(column.tobytes(), made)
    for row, _ in result.row_error:
        made = zlib.crc32(row.to_bytes(4, "little"), made)
    return made


def moves(runner: RankRunner, cache: Cache) -> tuple[TransferThread | None, Reports | None, Endpoint | None]:
    """Return the transfer, the reports and the endpoint of a rank for ``cache``. Absent parts are None."""
    if cache == "kv":
        return runner.transfer, runner.reports, runner.endpoint
    own = runner.embeddings
    return (None, None, None) if own is None else (own.transfer, own.reports, own.endpoint)
