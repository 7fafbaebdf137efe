"""Keeps the worker processes of a server's replicas: they outlive their heads, and never the server.

A head says which ranks are to run and which to end (``weft.engine.supervised_ranks``); the next head of its
replica finds those that still run. All of them end with this process, however it ends.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

from weft.common.log import get_logger
from weft.engine import supervised_ranks as protocol
from weft.engine.ranks import RankProcesses, end_of

log = get_logger(__name__)

_TURN = 0.1
"""Seconds between two looks at processes, and at most until a head is answered."""


class _Replica:
    """The workers of one replica. Used from the supervisor's thread."""

    def __init__(self, number: int, processes: RankProcesses) -> None:
        self.number, self.processes = number, processes
        self.pipe: Connection | None = None
        """To its present head."""
        self._told: dict[int, None] = {}
        """Processes whose end that head knows of."""

    def follow(self, pipe: Connection) -> None:
        """Another head: what the one before it still asks for is not read."""
        if self.pipe is not None:
            self.pipe.close()
        self.pipe, self._told = pipe, {}

    def serve(self) -> None:
        """Answers one request of the head, which is there."""
        assert self.pipe is not None
        try:
            request = protocol.from_head.decode(self.pipe.recv_bytes(protocol.MOST_BYTES))
        except (OSError, EOFError):  # it is gone: another one will follow, or none
            self.pipe.close()
            self.pipe = None
            return
        if isinstance(request, protocol.StartRank):
            before = self.processes.spawn(request.rank)
            self._tell(protocol.RankRuns(request.rank, self.processes.pid(request.rank), before))
        else:
            if self.processes.keeps(request.rank) and self.processes.pid(request.rank) == request.pid:
                self.processes.kill(request.rank)
            self._tell(protocol.RankEnded(request.rank, request.pid, -signal.SIGKILL))

    def look(self) -> None:
        """Tells the head of processes that ended by themselves."""
        for rank, status in self.processes.ended():
            pid = self.processes.pid(rank)
            if pid not in self._told:
                self._told[pid] = None
                if status:
                    log.warning("rank %d of replica %d: %s", rank, self.number, end_of(status))
                self._tell(protocol.RankEnded(rank, pid, status))

    def _tell(self, message: protocol.RankRuns | protocol.RankEnded) -> None:
        if self.pipe is not None:
            with suppress(OSError):  # see ``serve``
                self.pipe.send_bytes(protocol.encode(message))


class RankSupervisor:
    """One for a server. ``link`` and ``close`` may be called from any thread."""

    def __init__(self, replicas: int, processes: Callable[[int], RankProcesses]) -> None:
        """``processes(replica)``: where the workers of a replica are started."""
        self._replicas = [_Replica(number, processes(number)) for number in range(replicas)]
        self._new: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-rank-supervisor", daemon=True)
        self._thread.start()

    def link(self, replica: int) -> Connection:
        """A new head's end of the pipe to here. Give it to its process, and close it in this one."""
        ours, theirs = Pipe()
        with self._lock:
            unseen, self._new[replica] = self._new.get(replica), ours
        if unseen is not None:
            unseen.close()
        return theirs

    def close(self, seconds: float) -> None:
        """Gives all workers, which were told to stop, ``seconds`` to end, then kills them."""
        self._stop.set()
        self._thread.join(protocol.ANSWER_S)
        until = time.monotonic() + seconds
        for replica in self._replicas:
            if replica.pipe is not None:
                replica.pipe.close()
            replica.processes.close(max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                new, self._new = self._new, {}
            for number, pipe in new.items():
                self._replicas[number].follow(pipe)
            ready = wait([replica.pipe for replica in self._replicas if replica.pipe is not None], _TURN)
            for replica in self._replicas:
                try:
                    if replica.pipe in ready:
                        replica.serve()
                    replica.look()
                except Exception:  # of one replica, whose head hears nothing and ends in time
                    log.exception("the ranks of replica %d", replica.number)
