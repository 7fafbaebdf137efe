"""A head's side of the rank supervisor: worker processes that outlive their head and serve the next one.

The server's process runs the supervisor (``weft.engine.rank_supervisor``). Messages of the pipe between them:

    head                     supervisor
     │ StartRank(rank) ───────► │   starts the process, unless it runs
     │ ◄─────── RankRuns(rank)  │   its process id, and whether it ran before
     │ EndRank(rank) ─────────► │   kills the process
     │ ◄────── RankEnded(rank)  │   also sent unasked, when a process ended by itself

Each head has its own pipe: the next head does not see the messages of the one before.
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
"""Seconds within which the supervisor must answer."""
MOST_BYTES = 4096
"""Size of a message at most."""


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Head to supervisor: start the process of ``rank``, unless it runs. Answered by RankRuns."""

    rank: int


class EndRank(msgspec.Struct, frozen=True, tag=True):
    """Head to supervisor: kill process ``pid`` of ``rank``. Answered by RankEnded."""

    rank: int
    pid: int


class RankRuns(msgspec.Struct, frozen=True, tag=True):
    """Supervisor to head: the process of ``rank`` runs."""

    rank: int
    pid: int
    before: bool
    """Whether it ran before StartRank came."""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Supervisor to head: a process ended, by itself or after EndRank."""

    rank: int
    pid: int
    status: int
    """Exit status; for a signal its negative number."""


_from_supervisor = msgspec.msgpack.Decoder(RankRuns | RankEnded)
from_head = msgspec.msgpack.Decoder(StartRank | EndRank)
encode = msgspec.msgpack.encode


class SupervisedRanks:
    """``Ranks`` of a head whose workers belong to the server's rank supervisor. Thread-safe."""

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
            answer = self._ask(StartRank(rank), lambda got: isinstance(got, RankRuns) and got.rank == rank)
            assert isinstance(answer, RankRuns)
            self._pids[rank] = answer.pid
            return answer.before

    def keeps(self, rank: int) -> bool:
        """See ``Ranks``."""
        return rank in self._pids

    def pid(self, rank: int) -> int:
        """Process id of ``rank``."""
        return self._pids[rank]

    def dead(self) -> list[tuple[int, str]]:
        """See ``Ranks``. Never waits for the supervisor; without a supervisor this head ends, too."""
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
        """Closes the pipe. The ranks go on running."""
        self._pipe.close()

    def _ask(
        self, request: StartRank | EndRank, answers: Callable[[RankRuns | RankEnded], bool]
    ) -> RankRuns | RankEnded:
        try:
            self._pipe.send_bytes(encode(request))
        except (OSError, ValueError) as error:
            raise EngineDead("the rank supervisor is gone") from error
        until = time.monotonic() + ANSWER_S
        while (left := until - time.monotonic()) > 0:
            got = self._receive(left)
            if got is not None and answers(got):
                return got
        raise EngineDead(f"the rank supervisor did not answer within {ANSWER_S:g} s")

    def _receive(self, wait: float) -> RankRuns | RankEnded | None:
        """The supervisor's next message; None when none came within ``wait`` seconds."""
        try:
            if not self._pipe.poll(wait):
                return None
            got = _from_supervisor.decode(self._pipe.recv_bytes(MOST_BYTES))
        except (OSError, EOFError) as error:
            raise EngineDead("the rank supervisor is gone") from error
        if isinstance(got, RankEnded):
            self._ended[got.pid] = got.status
        return got
