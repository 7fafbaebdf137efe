"""An engine's side of the rank supervisor, which owns worker processes that outlive their engine process.

The server's process runs the supervisor (``weft.engine.ranks.rank_supervisor``). Messages of the pipe between
them:

    engine                   supervisor
     │ StartRank(rank) ───────► │   starts the process, unless the process runs
     │ ◄─────── RankRuns(rank)  │   process id, and whether the process ran before
     │ EndRank(rank) ─────────► │   kills the process
     │ ◄────── RankEnded(rank)  │   also sent without a request, when a process ended by itself

Each engine process has a separate pipe, so an engine never reads messages for an earlier engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from weft.common.errors import EngineDead
from weft.engine.ranks.ranks import end_of

ANSWER_S = 60.0
"""Maximum seconds for an answer of the supervisor."""
MOST_BYTES = 4096
"""Maximum bytes of a message."""


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Engine to supervisor: start the process of ``rank`` unless the process runs. Answered by RankRuns."""

    rank: int


class EndRank(msgspec.Struct, frozen=True, tag=True):
    """Engine to supervisor: kill process ``pid`` of ``rank``. Answered by RankEnded."""

    rank: int
    pid: int


class RankRuns(msgspec.Struct, frozen=True, tag=True):
    """Supervisor to engine: the process of ``rank`` runs."""

    rank: int
    pid: int
    before: bool
    """True if the process already ran when StartRank arrived."""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Supervisor to engine: a process has ended, with or without EndRank."""

    rank: int
    pid: int
    status: int
    """Exit status; for a signal the negative signal number."""


_from_supervisor = msgspec.msgpack.Decoder(RankRuns | RankEnded)
from_engine = msgspec.msgpack.Decoder(StartRank | EndRank)
encode = msgspec.msgpack.encode


class SupervisedRanks:
    """``Ranks`` of an engine process with workers owned by the server's rank supervisor. Thread-safe."""

    outlive = True

    def __init__(self, pipe: Connection) -> None:
        """``pipe``: to the rank supervisor of the server."""
        self._pipe = pipe
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        """Process id -> exit status."""
        self._lock = threading.Lock()

    def spawn(self, rank: int) -> bool:
        """Start the process of ``rank`` unless the process runs. Return True if the process ran already. See
        ``Ranks``.

        Raises EngineDead when the supervisor is gone or does not answer.
        """
        with self._lock:
            answer = self._ask(StartRank(rank), lambda got: isinstance(got, RankRuns) and got.rank == rank)
            assert isinstance(answer, RankRuns)
            self._pids[rank] = answer.pid
            return answer.before

    def keeps(self, rank: int) -> bool:
        """Return True if the process of ``rank`` is on the local host."""
        return rank in self._pids

    def pid(self, rank: int) -> int:
        """Return the process id of ``rank``."""
        return self._pids[rank]

    def dead(self) -> list[tuple[int, str]]:
        """Return (rank, description of the end) of each ended process. Never blocks. Empty while another
        thread waits for an answer of the supervisor. A lost supervisor is ignored here, because the engine
        process ends, too.
        """
        # Another thread waits for the supervisor: check again later.
        if not self._lock.acquire(blocking=False):
            return []
        try:
            with suppress(EngineDead):
                while self._receive(0) is not None:
                    pass
            return [(rank, end_of(self._ended[p])) for rank, p in self._pids.items() if p in self._ended]
        finally:
            self._lock.release()

    def kill(self, rank: int) -> None:
        """Kill the process of ``rank`` and forget the process. Raises EngineDead as ``spawn`` does."""
        with self._lock:
            pid = self._pids.pop(rank, None)
            if pid is not None and pid not in self._ended:
                self._ask(EndRank(rank, pid), lambda got: isinstance(got, RankEnded) and got.pid == pid)

    def close(self, seconds: float) -> None:
        """Close the pipe. The ranks keep running."""
        self._pipe.close()

    def _ask(
        self, request: StartRank | EndRank, answers: Callable[[RankRuns | RankEnded], bool]
    ) -> RankRuns | RankEnded:
        """Send ``request`` and return the first message for which ``answers`` is True.

        Blocks up to ``ANSWER_S`` seconds. Other messages are recorded. Raises EngineDead without an answer.
        """
        try:
            self._pipe.send_bytes(encode(request))
        except (OSError, ValueError) as error:
            raise EngineDead("the rank supervisor is gone") from error
        until = time.monotonic() + ANSWER_S
        # Ends of other processes may arrive before the answer: `_receive` records the ends.
        while (left := until - time.monotonic()) > 0:
            got = self._receive(left)
            if got is not None and answers(got):
                return got
        raise EngineDead(f"the rank supervisor did not answer within {ANSWER_S:g} s")

    def _receive(self, wait: float) -> RankRuns | RankEnded | None:
        """Return the supervisor's next message, or None if no message came within ``wait`` seconds.

        Records the status of an ended process. Raises EngineDead when the supervisor is gone.
        """
        try:
            if not self._pipe.poll(wait):
                return None
            got = _from_supervisor.decode(self._pipe.recv_bytes(MOST_BYTES))
        except (OSError, EOFError) as error:
            raise EngineDead("the rank supervisor is gone") from error
        if isinstance(got, RankEnded):
            self._ended[got.pid] = got.status
        return got
