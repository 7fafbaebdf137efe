"""Worker processes that outlive their head: the server keeps them (``weft.engine.rank_supervisor``) for the
next one.

    head                        supervisor
     │ StartRank(rank) ─────────────► │   sees that its process runs
     │ ◄─────────── RankRuns(rank)  │   which process, and whether it ran before
     │ EndRank(rank) ─────────────► │   ends it at once
     │ ◄────────── RankEnded(rank)  │   and unasked, when one ended by itself

Each head has a pipe of its own, so nothing that one asked for, or was told, reaches the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from weft.common.errors import EngineDead
from weft.engine.ranks import end_of

ANSWER_S = 60.0
"""Seconds in which the supervisor answers."""
MOST_BYTES = 4096
"""Of a message."""


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Head to supervisor: the process of ``rank`` is to run."""

    rank: int


class EndRank(msgspec.Struct, frozen=True, tag=True):
    """Head to supervisor: this process of ``rank`` is to end, stopped or not."""

    rank: int
    pid: int


class RankRuns(msgspec.Struct, frozen=True, tag=True):
    """RankSupervisor to head."""

    rank: int
    pid: int
    before: bool
    """Whether it ran already."""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """RankSupervisor to head."""

    rank: int
    pid: int
    status: int
    """As ``subprocess`` has it: of a signal the negative number."""


_from_supervisor = msgspec.msgpack.Decoder(RankRuns | RankEnded)
from_head = msgspec.msgpack.Decoder(StartRank | EndRank)
encode = msgspec.msgpack.encode


class SupervisedRanks:
    """``Ranks`` of a head whose server keeps them. Thread-safe."""

    outlive = True

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        """Process -> status."""
        self._lock = threading.Lock()

    def spawn(self, rank: int) -> bool:
        """See ``Ranks``. Raises EngineDead when the supervisor is gone or does not answer."""
        with self._lock:
            made = self._ask(StartRank(rank), lambda got: isinstance(got, RankRuns) and got.rank == rank)
            assert isinstance(made, RankRuns)
            self._pids[rank] = made.pid
            return made.before

    def keeps(self, rank: int) -> bool:
        """See ``Ranks``."""
        return rank in self._pids

    def pid(self, rank: int) -> int:
        """Of the rank's process."""
        return self._pids[rank]

    def dead(self) -> list[tuple[int, str]]:
        """See ``Ranks``. Never waits for the supervisor; when that is gone, so is this head."""
        if not self._lock.acquire(blocking=False):  # the supervisor is being asked: look again later
            return []
        try:
            with suppress(EngineDead):
                while self._receive(0) is not None:
                    pass
            return [(rank, end_of(self._ended[p])) for rank, p in self._pids.items() if p in self._ended]
        finally:
            self._lock.release()

    def kill(self, rank: int) -> None:
        """See ``Ranks``. Raises EngineDead as ``spawn`` does."""
        with self._lock:
            pid = self._pids.pop(rank, None)
            if pid is not None and pid not in self._ended:
                self._ask(EndRank(rank, pid), lambda got: isinstance(got, RankEnded) and got.pid == pid)

    def close(self, seconds: float) -> None:
        """The ranks stay as they are."""
        self._pipe.close()

    def _ask(
        self, request: StartRank | EndRank, answers: Callable[[RankRuns | RankEnded], bool]
    ) -> RankRuns | RankEnded:
        try:
            self._pipe.send_bytes(encode(request))
        except (OSError, ValueError) as error:
            raise EngineDead("whoever keeps the ranks is gone") from error
        until = time.monotonic() + ANSWER_S
        while (left := until - time.monotonic()) > 0:
            got = self._receive(left)
            if got is not None and answers(got):
                return got
        raise EngineDead(f"whoever keeps the ranks did not answer within {ANSWER_S:g} s")

    def _receive(self, wait: float) -> RankRuns | RankEnded | None:
        """The supervisor's next message; None when none came within ``wait`` seconds."""
        try:
            if not self._pipe.poll(wait):
                return None
            got = _from_supervisor.decode(self._pipe.recv_bytes(MOST_BYTES))
        except (OSError, EOFError) as error:
            raise EngineDead("whoever keeps the ranks is gone") from error
        if isinstance(got, RankEnded):
            self._ended[got.pid] = got.status
        return got
