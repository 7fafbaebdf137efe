"""Supervises the worker processes of a server's replicas. Workers outlive engine processes, but not the
server.

An engine process requests starts and kills of ranks (``weft.engine.ranks.supervised_ranks``). The next engine
process of the replica takes over the running ranks. The kernel ends all ranks with the supervisor's process.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.engine.ranks import supervised_ranks as protocol
from weft.engine.ranks.ranks import RankProcesses, end_of

log = get_logger(__name__)

_TURN = 0.1
"""Seconds between two checks of the processes. Also the maximum wait of an engine process for an answer."""


class _Replica:
    """The workers of one replica. Used from the supervisor's thread."""

    def __init__(self, number: int, processes: RankProcesses) -> None:
        self.number = number
        self.processes = processes
        self.pipe: Connection | None = None
        """Pipe to the current engine process of the replica; None without an engine process."""
        self._told: dict[int, None] = {}
        """Process ids of ended processes already reported to the current engine process."""

    def follow(self, pipe: Connection) -> None:
        """Use the pipe of a new engine process. Unread requests of the previous engine process are
        dropped.
        """
        if self.pipe is not None:
            self.pipe.close()
        self.pipe = pipe
        self._told = {}

    def renew(self, config: EngineConfig) -> None:
        """End all workers, and start later ones with the settings ``config``."""
        for rank in self.processes.ranks():
            self.processes.kill(rank)
        self.processes.use(config)

    def serve(self) -> None:
        """Read and answer one request: start a process, or kill a process with the requested pid.

        A request, or the end of the engine process, must be pending in the pipe.

        At the end of the engine process, close the pipe and set ``pipe`` to None. Raises EngineDead or
        OSError if a process cannot be started.
        """
        assert self.pipe is not None
        try:
            request = protocol.from_engine.decode(self.pipe.recv_bytes(protocol.MOST_BYTES))
        except (OSError, EOFError):  # the engine process is gone; another engine process may follow
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
        """Send RankEnded to the engine process for each process ended without a request, once per process.

        A bad exit status is logged.
        """
        for rank, status in self.processes.ended():
            pid = self.processes.pid(rank)
            if pid not in self._told:
                self._told[pid] = None
                if status:
                    log.warning("rank %d of replica %d: %s", rank, self.number, end_of(status))
                self._tell(protocol.RankEnded(rank, pid, status))

    def _tell(self, message: protocol.RankRuns | protocol.RankEnded) -> None:
        if self.pipe is not None:
            with suppress(OSError):  # `serve` will notice the loss of the engine process
                self.pipe.send_bytes(protocol.encode(message))


class RankSupervisor:
    """Supervises all worker processes of a server. ``link`` and ``close`` are safe from any thread."""

    def __init__(self, replicas: int, processes: Callable[[int], RankProcesses]) -> None:
        """``processes(replica)`` returns the process starter of a replica. Starts the supervisor's thread."""
        self._replicas = [_Replica(number, processes(number)) for number in range(replicas)]
        self._new: dict[int, Connection] = {}
        self._renewed: dict[int, EngineConfig] = {}
        """Replica -> settings of its workers from the next engine process on."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-rank-supervisor", daemon=True)
        self._thread.start()

    def link(self, replica: int) -> Connection:
        """Return the engine's end of a new pipe, which replaces the replica's former pipe.

        Pass the pipe to the engine's process, then close the pipe here.
        """
        ours, theirs = Pipe()
        with self._lock:
            unseen, self._new[replica] = self._new.get(replica), ours
        if unseen is not None:
            unseen.close()
        return theirs

    def use(self, config: Callable[[int], EngineConfig]) -> None:
        """Start the workers of later engine processes with the settings ``config(replica)``.

        Other workers end when the next engine process of their replica links. Safe from any thread.
        """
        with self._lock:
            self._renewed = {replica.number: config(replica.number) for replica in self._replicas}

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for all workers, which have received a shutdown, then kill the rest.

        Ends the supervisor's thread first.
        """
        self._stop.set()
        self._thread.join(protocol.ANSWER_S)
        until = time.monotonic() + seconds
        for replica in self._replicas:
            if replica.pipe is not None:
                replica.pipe.close()
            replica.processes.close(max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        """Serve the pipes of all replicas and report ended processes, until ``close``. Errors are logged."""
        while not self._stop.is_set():
            with self._lock:
                new, self._new = self._new, {}
                renewed = {number: self._renewed.pop(number) for number in new if number in self._renewed}
            for number, pipe in new.items():
                if number in renewed:
                    self._replicas[number].renew(renewed[number])
                self._replicas[number].follow(pipe)
            ready = wait([replica.pipe for replica in self._replicas if replica.pipe is not None], _TURN)
            for replica in self._replicas:
                try:
                    if replica.pipe in ready:
                        replica.serve()
                    replica.look()
                # An error concerns one replica: the engine process gets no answer and ends by time-out.
                except Exception:
                    log.exception("error in the rank supervisor of replica %d", replica.number)
