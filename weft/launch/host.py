"""A host other than the first, of a server with several replicas: runs the heads that the front wants here,
and ranks of replicas whose head is on another host.

What to run is read from the board of host 0, again and again, and made so: no order is sent that could be
lost, or come late.
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

from weft.common import log
from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.common.restarts import RestartBudget
from weft.config.hosts import head_of, heads_on, meeting_place, workers_on
from weft.config.resolved import EngineConfig
from weft.engine.heads import LocalHeads
from weft.engine.listener import TELL_S
from weft.engine.ranks import RankProcesses
from weft.launch.node import RESTARTS, WINDOW, HostRanks, until_stopped
from weft.parallel.address import own_address, tcp
from weft.parallel.board import RENEW_S, BoardClient, board_place
from weft.parallel.remote import REMIND_S, host_settings
from weft.routing.instance_table import LISTEN_S as HEAD_LISTENS_S
from weft.types import board as b

logger = log.get_logger(__name__)

PATIENCE = 3600.0
"""Seconds without a word of host 0 after which this host gives up."""
LISTEN_S = HEAD_LISTENS_S + TELL_S
"""Seconds from starting a head until the board says where it listens. One that cannot tell the board ends by
itself before; one that was stopped, or hangs, does not, and neither does its front see it.
"""
_LOOK = 0.2


def serve_host(config: EngineConfig, log_level: str) -> int:
    """Runs what the front wants on host ``--node-rank`` until the server ends (its status, 0 or 1), or a
    signal comes (0). Status 1 when host 0 is silent for an hour, or ranks end too often. Raises ConfigError.
    """
    parallel = config.parallel
    place, keys = board_place(parallel)
    host = own_address(*meeting_place(parallel))
    logger.info(
        "host %d of %d: heads %s and ranks %s for %s",
        parallel.node_rank,
        parallel.nnodes,
        heads_on(parallel, parallel.node_rank),
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
    """The replicas whose head is not in the incarnation that it should be in: what runs of it ends, and
    unless that incarnation is 0 (none) it is started. Pure.
    """
    return [replica for replica, incarnation in wanted.items() if started.get(replica, 0) != incarnation]


class _Host:
    """What runs here, and what of it the board was told."""

    def __init__(
        self, config: EngineConfig, client: BoardClient, folder: Path, endpoint: str, log_level: str
    ) -> None:
        self._local = LocalHeads(config, folder, log_level)
        self._config = config
        self._client = client
        self._endpoint = endpoint
        self._level = log_level
        self._number = config.parallel.node_rank
        self._mine = heads_on(config.parallel, self._number)
        self._started: dict[int, int] = {}
        """Replica -> the incarnation that its head was started in last."""
        self._heads: dict[int, subprocess.Popen[bytes]] = {}
        self._unheard: dict[int, float] = {}
        """Replica -> when its head was started, until the board says that it listens."""
        self._ranks: dict[int, tuple[bytes, HostRanks]] = {}
        """Replica -> where its head's ranks find it, and its ranks here."""
        self._budget = RestartBudget(RESTARTS, WINDOW)
        self._board = 0
        self._remind_at = 0.0
        self._mark = secrets.token_hex(8)
        client.post(b.settings_key(self._number, self._mark), msgspec.msgpack.encode(host_settings(config)))

    def run(self) -> int:
        """Until the server ends. Raises ConfigError when host 0 refuses this one."""
        while True:
            if self._client.look(_LOOK):
                if self._client.board != self._board:
                    self._begin()
                if (over := self._client.entries.get(b.OVER)) is not None:
                    return self._leave(msgspec.msgpack.decode(over, type=int))
                self._follow()
            elif self._silent() > PATIENCE:
                logger.error("host 0 has been silent for %g s: %s", PATIENCE, self._client.why)
                return 1
            elif self._heads and self._silent() > self._config.parallel.rank_timeout:
                # Its front has given them up, and will want others.
                ended = self._end_heads()
                logger.error("host 0 is silent: heads %s of this host end", ended)
                for replica in ended:
                    self._tell_end(replica, -signal.SIGKILL)
            self._remind()
            if not all(ranks.look() for _, ranks in self._ranks.values()):
                return 1
            time.sleep(_LOOK)

    def end(self) -> None:
        """Ends everything that runs here."""
        self._end_heads()
        self._local.close(0.0)
        for _, ranks in self._ranks.values():
            ranks.close()
        self._ranks.clear()

    def _remind(self) -> None:
        """Tells from time to time that host 0 does not answer, and why."""
        now = time.monotonic()
        if self._silent() < RENEW_S:
            self._remind_at = now
        elif now >= self._remind_at:
            self._remind_at = now + REMIND_S
            logger.warning("host 0 does not answer at %s: %s", self._config.parallel.rdzv, self._client.why)

    def _silent(self) -> float:
        return time.monotonic() - self._client.heard

    def _begin(self) -> None:
        """Another board, another server: what runs here belongs to none of its front."""
        self.end()
        self._started.clear()
        self._board = self._client.board

    def _leave(self, status: int) -> int:
        self.end()
        self._client.post(b.gone_key(self._number), b"")
        self._client.look(1.0)
        return min(status, 1)

    def _follow(self) -> None:
        """Makes it so, as the board says."""
        answer = self._client.entries.get(b.answer_key(self._number, self._mark))
        if answer is None:
            return
        if answer:
            raise ConfigError(f"refused by host 0: {answer.decode()}")
        for replica, head in list(self._heads.items()):
            if (status := head.poll()) is not None:
                del self._heads[replica]
                level = logging.ERROR if status else logging.INFO
                logger.log(level, "head %d ended with status %d", replica, status)
                self._tell_end(replica, status)
        self._end_unheard()
        wanted = self._wanted()
        for replica in due(wanted, self._started):
            if replica in self._heads:
                _kill(self._heads.pop(replica))
            self._started[replica] = wanted[replica]
            if wanted[replica]:
                self._start(replica, wanted[replica])
        self._follow_ranks()

    def _wanted(self) -> dict[int, int]:
        found = {replica: self._client.entries.get(b.wanted_key(replica)) for replica in self._mine}
        return {r: msgspec.msgpack.decode(data, type=int) for r, data in found.items() if data is not None}

    def _start(self, replica: int, incarnation: int) -> None:
        self._heads[replica] = self._local.start(replica, self._endpoint, incarnation)
        self._unheard[replica] = time.monotonic()
        logger.info("head %d is started", replica)

    def _end_unheard(self) -> None:
        """Ends heads that were to listen by now. One that was heard once is its front's affair."""
        for replica, since in list(self._unheard.items()):
            if replica not in self._heads or self._listens(replica):
                del self._unheard[replica]
            elif time.monotonic() - since > LISTEN_S:
                del self._unheard[replica]
                logger.error("head %d did not listen within %g s and is ended", replica, LISTEN_S)
                _kill(self._heads.pop(replica))
                self._tell_end(replica, -signal.SIGKILL)

    def _listens(self, replica: int) -> bool:
        """Whether the board says where the head listens, in the incarnation that runs here."""
        data = self._client.entries.get(b.head_key(replica))
        incarnation = None if data is None else msgspec.msgpack.decode(data, type=b.Listening).incarnation
        return incarnation == self._started[replica]

    def _tell_end(self, replica: int, status: int) -> None:
        incarnation = self._started[replica]
        self._client.post(
            b.ended_key(replica), msgspec.msgpack.encode(b.HeadEnded(incarnation=incarnation, status=status))
        )

    def _follow_ranks(self) -> None:
        """Ranks of a replica say hello where its present head is: one that was started anew is elsewhere."""
        parallel = self._config.parallel
        wanted: dict[int, list[int]] = {}
        for rank in workers_on(parallel, self._number):
            wanted.setdefault(parallel.layout.replica(head_of(parallel, rank)), []).append(rank)
        for replica, mine in wanted.items():
            address = self._client.entries.get(b.control_key(replica))
            known = self._ranks.get(replica)
            if address is None or (known is not None and known[0] == address):
                continue
            if known is not None:
                known[1].close()
            own = msgspec.structs.replace(self._config, replica=replica)
            processes = RankProcesses(own, address.decode(), self._level)
            self._ranks[replica] = address, HostRanks(processes, mine, parallel.rank_timeout, self._budget)

    def _end_heads(self) -> list[int]:
        """The replicas whose heads ran."""
        ended = list(self._heads)
        for replica in ended:
            _kill(self._heads.pop(replica))
        return ended


def _kill(head: subprocess.Popen[bytes]) -> None:
    head.kill()
    head.wait(30.0)
