"""The KV tier on all ranks of a group: commands to every rank, and one outcome for the group.

The outcome of a block is the least outcome of all ranks. A rank whose process has ended counts as ``LOST``.
Frames to other ranks travel in order with the frames of steps.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.engine.ranks.executor import RankRunner
from weft.kv.tiers import Changed, Copied, Stopped
from weft.runner.tier_thread import TierThread, tier_of
from weft.types import frames as f
from weft.types.tiers import (
    EVERY,
    BlockOutcome,
    BlocksCopied,
    CopyBlocks,
    StoreChanged,
    StoredElsewhere,
    StoreState,
    TierCommand,
)

_POLL_S = 0.002
TierWord = Copied | Changed | Stopped | StoredElsewhere | StoreState


class _Sockets(Protocol):
    @property
    def sockets(self) -> Sequence[Any]: ...


@dataclass(slots=True)
class _Job:
    """A command under way."""

    waiting: set[int]
    """Ranks without a report."""
    outcomes: bytearray
    """The least outcome of each block so far."""
    levels: bytearray
    """The levels in which every rank so far has stored each block."""
    nbytes: int = 0
    seconds: float = 0.0


class GroupTier:
    """The engine's side of the tier. Used from the stepping thread, except ``ended``."""

    def __init__(
        self,
        own: TierThread,
        own_rank: int,
        others: Iterable[int],
        send: Callable[[int, bytes], bool],
        poll: Callable[[], object] = lambda: None,
        sockets: Sequence[Any] = (),
    ) -> None:
        """``own``: the thread of the engine's rank. ``others``: all other ranks. ``send(rank, frame)`` must
        not block, and returns False if the rank cannot take commands now. ``poll`` reads the frames that have
        arrived, without blocking."""
        self._own, self._rank, self._others, self._send = own, own_rank, tuple(others), send
        self._poll = poll
        self._sockets = [own.descriptor, *sockets]
        self._jobs: dict[int, _Job] = {}
        self._gone: deque[int] = deque()
        """Ranks with ended processes."""
        self._off = ""
        self._early = list[TierWord]()
        """Reports from before the first ``take``."""

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets and descriptors, readable when ranks have sent reports."""
        return self._sockets

    def wait(self, seconds: float) -> None:
        """Block until the stores of all ranks are open, for at most ``seconds``."""
        until = time.monotonic() + seconds
        self._own.wait(seconds)
        self.regain()
        while self._jobs and time.monotonic() < until:
            self._early += self._read()
            time.sleep(_POLL_S)

    def send(self, command: TierCommand) -> None:
        """Execute a command on every rank. A rank that cannot take the command counts as lost."""
        ranks = {self._rank, *self._others}
        if isinstance(command, CopyBlocks):
            self._jobs[command.job] = _Job(
                ranks, bytearray([BlockOutcome.DONE]) * command.size, bytearray([EVERY]) * command.size
            )
        self._own.put(command)
        data = f.encode(command) if self._others else b""
        for rank in self._others:
            if not self._send(rank, data) and isinstance(command, CopyBlocks):
                self._lost(command.job, rank)

    def regain(self) -> None:
        """Send a fence to all ranks, after a recovery of the group. Commands and reports of broken
        connections are lost; once a rank has answered the fence, the rank has ended all earlier commands."""
        last = max((number for number in self._jobs if number >= 0), default=0)
        self.send(CopyBlocks(job=-1 - last, load=False))

    def report(self, copied: BlocksCopied) -> None:
        """Apply the report of a rank."""
        job = self._jobs.get(copied.job)
        if job is None or copied.rank not in job.waiting:
            return
        if copied.job < 0:
            for number in [number for number in self._jobs if 0 <= number <= -1 - copied.job]:
                self._lost(number, copied.rank)
        job.waiting.discard(copied.rank)
        job.outcomes[:] = bytes(map(min, job.outcomes, copied.outcomes))
        if copied.levels:
            job.levels[:] = bytes(map(operator.and_, job.levels, copied.levels))
        job.nbytes, job.seconds = max(job.nbytes, copied.nbytes), max(job.seconds, copied.seconds)

    def ended(self, rank: int) -> None:
        """Note the end of a rank's process. Safe from any thread."""
        self._gone.append(rank)

    def take(self) -> list[TierWord]:
        """Return what has happened, in order. Cheap when there is nothing."""
        early, self._early = self._early, []
        return [*early, *self._read()]

    def _read(self) -> list[TierWord]:
        words = list[TierWord]()
        if self._others and self._jobs:
            self._poll()
        for report in self._own.take():
            if isinstance(report, BlocksCopied):
                self.report(report)
            elif isinstance(report, StoreChanged):
                words.append(Changed(report.added, report.gone, report.level, report.whole))
            elif isinstance(report, StoredElsewhere):
                words.append(report)
            else:
                words.append(report)
                if report.off and report.off != self._off:
                    words.append(Stopped(report.off))
                self._off = report.off
        while self._gone:
            rank = self._gone.popleft()
            for number in list(self._jobs):
                self._lost(number, rank)
        # Most calls find nothing under way.
        for number in [number for number, job in self._jobs.items() if not job.waiting]:
            job = self._jobs.pop(number)
            if number >= 0:
                levels = bytes(job.levels)
                words.append(Copied(number, bytes(job.outcomes), job.nbytes, job.seconds, levels))
        return words

    def _lost(self, number: int, rank: int) -> None:
        job = self._jobs[number]
        if rank in job.waiting:
            job.waiting.discard(rank)
            job.outcomes[:] = bytes([BlockOutcome.LOST]) * len(job.outcomes)


def make_group_tier(
    runner: RankRunner,
    members: Mapping[int, object],
    send: Callable[[int, bytes], bool],
    poll: Callable[[], object],
    channel: _Sockets,
) -> GroupTier | None:
    """Return the tier of all ranks, or None if the engine's own rank has none."""
    own = tier_of(runner)
    return None if own is None else GroupTier(own, -1, members, send, poll, channel.sockets)
