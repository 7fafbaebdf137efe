"""What ``EngineCore`` asks of whoever carries out its plans: one rank's Runner, or a whole group."""

from __future__ import annotations

import zlib
from typing import Protocol

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig
from weft.runner.graphs import DecodeGraphs
from weft.runner.runner import StepHandle
from weft.speculation.base import Drafter
from weft.types.plan import StepPlan, StepResult


class GroupLost(EngineDead):
    """A group cannot go on as it is. Its ranks that still run have stopped, with weights kept.

    ``rank``: who is at fault; None when it cannot be told, or nobody is (a link that broke).
    ``refused``: whether that rank cannot load as it is configured.
    """

    def __init__(self, rank: int | None, reason: str, refused: bool = False) -> None:
        who = "a rank" if rank is None else f"rank {rank}"
        super().__init__(f"{who} of the group is lost: {reason}")
        self.rank, self.reason, self.refused = rank, reason, refused


class Executor(Protocol):
    """See ``weft.runner.runner.Runner``, whose contract this is. A group raises GroupLost besides."""

    @property
    def kv(self) -> KVConfig: ...

    @property
    def graphs(self) -> DecodeGraphs | None: ...

    @property
    def drafter(self) -> Drafter | None: ...

    @property
    def varying(self) -> tuple[str, ...]: ...

    def forward(self, plan: StepPlan) -> StepHandle: ...

    def sample(self, handle: StepHandle) -> None: ...

    def read(self, handle: StepHandle) -> StepResult: ...

    def check(self) -> None:
        """Looks after the other ranks while nothing is computed; does not wait. Raises GroupLost."""

    def recover(self, lost: EngineDead) -> None:
        """After GroupLost: forms the group anew, with no step in flight and all slots empty.

        Called in a thread of its own, while nobody else calls the executor. Raises EngineDead, past deadlines
        of its own at the latest, when the group cannot be formed.
        """

    def interrupt(self) -> None:
        """From another thread: ``recover`` should give up, perhaps again, as the engine is to be closed."""

    def close(self) -> None: ...


class RankRunner(Executor, Protocol):
    """One rank's own executor."""

    def done(self, handle: StepHandle) -> bool: ...

    def reset(self) -> None: ...


class OfRunner:
    """What the head of a group tells of its own runner."""

    _runner: RankRunner

    @property
    def kv(self) -> KVConfig:
        return self._runner.kv

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self._runner.graphs

    @property
    def drafter(self) -> Drafter | None:
        return self._runner.drafter

    @property
    def varying(self) -> tuple[str, ...]:
        return self._runner.varying


def checksum(result: StepResult) -> int:
    """Of what a step sampled: 32 bits, equal on all ranks of a group."""
    made = 0
    for column in (result.tokens, result.accepted, result.drafts):
        made = zlib.crc32(column.tobytes(), made)
    for row, _ in result.row_error:
        made = zlib.crc32(row.to_bytes(4, "little"), made)
    return made
