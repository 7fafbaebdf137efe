"""A host other than the first, in a server with several replicas.

The host runs the engines that the API server requests here, and the ranks of replicas with an engine on
another host. The host polls the rendezvous store of host 0 and applies the
requested state. No order is sent, so no order can be lost or late.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from weft.cli.processes.node import RESTARTS, WINDOW, HostRanks, until_stopped
from weft.common import log
from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.common.restarts import RestartBudget
from weft.config.hosts import engine_of, engines_on, meeting_place, workers_on
from weft.config.resolved import EngineConfig
from weft.control.fleet.instance_table import LISTEN_S as ENGINE_LISTENS_S
from weft.engine.ranks.ranks import RankProcesses
from weft.engine.server.engine_processes import LocalEngines
from weft.engine.server.listener import TELL_S
from weft.parallel.address import own_address, tcp
from weft.parallel.board import RENEW_S, BoardClient, board_place
from weft.parallel.remote import REMIND_S, host_settings
from weft.types import board as b

logger = log.get_logger(__name__)

PATIENCE = 3600.0
"""Seconds without contact to host 0 before the host gives up."""
LISTEN_S = ENGINE_LISTENS_S + TELL_S
"""Seconds from the start of an engine until the rendezvous store has the engine's address. An engine without
access to the store ends earlier. A stopped or hung engine does not end, and the API server cannot see the
engine.
"""
_LOOK = 0.2


def serve_host(config: EngineConfig, log_level: str) -> int:
    """Run the engines and ranks of host ``--node-rank`` until the server ends or a signal comes.

    Return the server's status (0 or 1), or 0 after a signal. Return 1 if host 0 is silent for an hour, or if
    ranks end too often. Engines, ranks and the private folder are gone afterwards. Raise ConfigError.
    """
    parallel = config.parallel
    place, keys = board_place(parallel)
    host = own_address(*meeting_place(parallel))
    logger.info(
        "host %d of %d runs engines %s and ranks %s for host 0 at %s",
        parallel.node_rank,
        parallel.nnodes,
        engines_on(parallel, parallel.node_rank),
        workers_on(parallel, parallel.node_rank),
        parallel.rdzv,
    )
    client = BoardClient(place, keys)
    folder = private_folder()
    made = _Host(config, client, folder, tcp(host, "*"), log_level)
    try:
        return until_stopped(made.run)
    finally:
        made.end()
        client.close()
        shutil.rmtree(folder, ignore_errors=True)


def due(wanted: Mapping[int, int], started: Mapping[int, int]) -> list[int]:
    """Return the replicas with an engine in the wrong incarnation. Pure.

    The caller ends the running engine of each replica, and starts the wanted incarnation unless it is 0
    (none).
    """
    return [replica for replica, incarnation in wanted.items() if started.get(replica, 0) != incarnation]


class _Host:
    """Engines and ranks of one host, with their state in the rendezvous store."""

    def __init__(
        self, config: EngineConfig, client: BoardClient, folder: Path, endpoint: str, log_level: str
    ) -> None:
        """Post this host's settings in the store.

        ``endpoint``: address on which engines of this host listen.
        """
        self._local = LocalEngines(config, folder, log_level)
        self._config = config
        self._client = client
        self._endpoint = endpoint
        self._level = log_level
        self._number = config.parallel.node_rank
        self._mine = engines_on(config.parallel, self._number)
        self._started: dict[int, int] = {}
        """Replica -> incarnation of the last start."""
        self._engines: dict[int, subprocess.Popen[bytes]] = {}
        self._unheard: dict[int, float] = {}
        """Replica -> start time of the engine, until the store has the address."""
        self._ranks: dict[int, tuple[bytes, HostRanks]] = {}
        """Replica -> the engine's address for ranks, and the replica's ranks on the host."""
        self._budget = RestartBudget(RESTARTS, WINDOW)
        self._board = 0
        self._remind_at = 0.0
        self._mark = secrets.token_hex(8)
        client.post(b.settings_key(self._number, self._mark), msgspec.msgpack.encode(host_settings(config)))

    def run(self) -> int:
        """Run until the server ends; return the exit status.

        Return 1 after ``PATIENCE`` without contact to host 0, or after too many ends of ranks. Raise
        ConfigError if host 0 refuses this host.
        """
        while True:
            if self._client.look(_LOOK):
                # Another store means another server: host 0 was restarted.
                if self._client.board != self._board:
                    self._begin()
                if (over := self._client.entries.get(b.OVER)) is not None:
                    return self._leave(msgspec.msgpack.decode(over, type=int))
                self._follow()
            elif self._silent() > PATIENCE:
                logger.error(
                    "no contact to host 0 for %g s, so this host stops: %s", PATIENCE, self._client.why
                )
                return 1
            elif self._engines and self._silent() > self._config.parallel.rank_timeout:
                # The API server counts the engines as lost and will request new engines.
                ended = self._end_engines()
                logger.error("no contact to host 0: engines %s of this host are stopped", ended)
                for replica in ended:
                    self._tell_end(replica, -signal.SIGKILL)
            self._remind()
            if not all(ranks.look() for _, ranks in self._ranks.values()):
                return 1
            time.sleep(_LOOK)

    def end(self) -> None:
        """End all engines and ranks of this host."""
        self._end_engines()
        self._local.close(0.0)
        for _, ranks in self._ranks.values():
            ranks.close()
        self._ranks.clear()

    def _remind(self) -> None:
        """Log from time to time that host 0 does not answer, with the reason."""
        now = time.monotonic()
        if self._silent() < RENEW_S:
            self._remind_at = now
        elif now >= self._remind_at:
            self._remind_at = now + REMIND_S
            logger.warning("host 0 does not answer at %s: %s", self._config.parallel.rdzv, self._client.why)

    def _silent(self) -> float:
        """Return the seconds since the last contact to host 0."""
        return time.monotonic() - self._client.heard

    def _begin(self) -> None:
        """End all engines and ranks of the previous server, and adopt the new store."""
        self.end()
        self._started.clear()
        self._board = self._client.board

    def _leave(self, status: int) -> int:
        """End everything, report the end of this host to the store, and return the status (0 or 1)."""
        self.end()
        self._client.post(b.gone_key(self._number), b"")
        self._client.look(1.0)
        return min(status, 1)

    def _follow(self) -> None:
        """Apply the requested state from the store: report ended engines, then end and start engines and
        ranks.

        Does nothing before host 0 has accepted this host. Raise ConfigError if host 0 refuses this host.
        """
        answer = self._client.entries.get(b.answer_key(self._number, self._mark))
        if answer is None:
            return
        if answer:
            raise ConfigError(f"host 0 refused this host: {answer.decode()}")
        # Engines are compared with the store's requests only after the report of ended engines.
        for replica, engine in list(self._engines.items()):
            if (status := engine.poll()) is not None:
                del self._engines[replica]
                level = logging.ERROR if status else logging.INFO
                logger.log(level, "engine %d ended with status %d", replica, status)
                self._tell_end(replica, status)
        self._end_unheard()
        wanted = self._wanted()
        for replica in due(wanted, self._started):
            # Never run two incarnations of an engine at the same time.
            if replica in self._engines:
                _kill(self._engines.pop(replica))
            self._started[replica] = wanted[replica]
            if wanted[replica]:
                self._start(replica, wanted[replica])
        self._follow_ranks()

    def _wanted(self) -> dict[int, int]:
        """Return replica -> requested incarnation, for the engines of this host."""
        found = {replica: self._client.entries.get(b.wanted_key(replica)) for replica in self._mine}
        return {r: msgspec.msgpack.decode(data, type=int) for r, data in found.items() if data is not None}

    def _start(self, replica: int, incarnation: int) -> None:
        """Start an engine and begin to wait for its address."""
        self._engines[replica] = self._local.start(replica, self._endpoint, incarnation)
        self._unheard[replica] = time.monotonic()
        logger.info("engine %d is started", replica)

    def _end_unheard(self) -> None:
        """End engines without an address in the store after ``LISTEN_S``, with a log line and a report.

        The API server watches all other engines.
        """
        for replica, since in list(self._unheard.items()):
            if replica not in self._engines or self._listens(replica):
                del self._unheard[replica]
            elif time.monotonic() - since > LISTEN_S:
                del self._unheard[replica]
                logger.error("engine %d did not listen within %g s and is stopped", replica, LISTEN_S)
                _kill(self._engines.pop(replica))
                self._tell_end(replica, -signal.SIGKILL)

    def _listens(self, replica: int) -> bool:
        """Return True if the store has the address of the present engine of ``replica``."""
        data = self._client.entries.get(b.engine_key(replica))
        incarnation = None if data is None else msgspec.msgpack.decode(data, type=b.Listening).incarnation
        return incarnation == self._started[replica]

    def _tell_end(self, replica: int, status: int) -> None:
        """Report the end of an engine, with its exit status, to the store."""
        incarnation = self._started[replica]
        self._client.post(
            b.ended_key(replica),
            msgspec.msgpack.encode(b.EngineEnded(incarnation=incarnation, status=status)),
        )

    def _follow_ranks(self) -> None:
        """Start the ranks of a replica for its present engine.

        A new engine has a new address, and needs new ranks: ranks of an earlier engine are ended.
        """
        parallel = self._config.parallel
        wanted: dict[int, list[int]] = {}
        for rank in workers_on(parallel, self._number):
            wanted.setdefault(parallel.layout.replica(engine_of(parallel, rank)), []).append(rank)
        for replica, mine in wanted.items():
            address = self._client.entries.get(b.control_key(replica))
            known = self._ranks.get(replica)
            # No engine yet, or the ranks belong to the present engine.
            if address is None or (known is not None and known[0] == address):
                continue
            if known is not None:
                known[1].close()
            own = msgspec.structs.replace(self._config, replica=replica)
            processes = RankProcesses(own, address.decode(), self._level)
            self._ranks[replica] = address, HostRanks(processes, mine, parallel.rank_timeout, self._budget)

    def _end_engines(self) -> list[int]:
        """Kill all engines and return their replicas."""
        ended = list(self._engines)
        for replica in ended:
            _kill(self._engines.pop(replica))
        return ended


def _kill(engine: subprocess.Popen[bytes]) -> None:
    """Kill an engine and wait for its end."""
    engine.kill()
    engine.wait(30.0)
