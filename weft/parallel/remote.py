"""Engine processes on other hosts, as seen from the host with the API server.

This side publishes the wanted incarnation of each engine in the rendezvous store. The hosts start and stop
processes accordingly: see ``weft.cli.processes.host``. A silent host is waited for; the links of its engines
report the loss.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable

import msgspec

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.group_settings import compare, shared_settings
from weft.config.hosts import engines_on, ranks_on
from weft.config.resolved import EngineConfig
from weft.parallel.board import Board, board_place, open_board
from weft.types import board as b
from weft.types import frames

log = get_logger(__name__)

REMIND_S = 30.0
"""Seconds between two log lines about an absent host."""
REFUSED = 2
"""Exit status reported for engines of a refused host; the same as for a refused configuration."""
AWAY_S = 3.0
"""Seconds of silence after which another process may take over a host's number."""
_LOOK = 0.05


class RemoteEngines:
    """The rendezvous store of a server, and the wanted and present engine processes of other hosts."""

    def __init__(self, config: EngineConfig) -> None:
        """Open the rendezvous store at ``--rdzv``. No engine is wanted yet. Raise ConfigError."""
        parallel = config.parallel
        self._settings = host_settings(config)
        _, self.keys = board_place(parallel)
        self._board = open_board(parallel)
        # Hosts outlive a server. Random incarnations keep reports about another server's engines apart.
        first = secrets.randbits(48) << 14
        self._incarnations = {
            r: first for node in range(1, parallel.nnodes) for r in engines_on(parallel, node)
        }
        self._hosts = [node for node in range(1, parallel.nnodes) if ranks_on(parallel, node)]
        self._present: dict[int, str] = {}
        """Host -> key of the settings entry of the accepted process."""
        self._answered: set[str] = set()
        """Settings keys of processes already accepted or refused."""
        self._waiting: dict[str, float] = {}
        """Settings key -> arrival time, for processes that came while another had the same number."""
        self._refused: dict[int, str] = {}
        """Host number -> reason of the refusal, as long as no process with the number was ever accepted.
        After that, the server waits for an acceptable process."""
        self._remind = time.monotonic() + REMIND_S

    def __contains__(self, replica: int) -> bool:
        """Return True if the engine of ``replica`` is on another host."""
        return replica in self._incarnations

    def start(self, replica: int) -> RemoteEngine:
        """Request a new process for the engine of ``replica``, in place of a running one. Does not wait."""
        self._incarnations[replica] += 1
        self._want(replica, self._incarnations[replica])
        return RemoteEngine(
            self._board, replica, self._incarnations[replica], self._lacks, self._end(replica)
        )

    def close(self, seconds: float, status: int = 0) -> None:
        """Announce the end of the server to all hosts, wait up to ``seconds`` until all have read it, and
        close the store. Silent hosts are logged.
        """
        self._check()
        self._board.post(b.OVER, msgspec.msgpack.encode(status))
        until = time.monotonic() + seconds
        while self._reading() and time.monotonic() < until:
            time.sleep(_LOOK)
        for host in self._reading():
            log.warning("host %d did not confirm the end of the server", host)
        self._board.close()

    def _want(self, replica: int, incarnation: int) -> None:
        self._board.post(b.wanted_key(replica), msgspec.msgpack.encode(incarnation))

    def _end(self, replica: int) -> Callable[[int], None]:
        """Return a function that requests the end of an incarnation of ``replica``.

        Requests for other incarnations are ignored.
        """

        def end(incarnation: int) -> None:
            if self._incarnations[replica] == incarnation:
                self._want(replica, 0)

        return end

    def _reading(self) -> list[int]:
        """Return the present hosts that have not read the end of the server."""
        ages = self._board.ages(b.settings_key())
        there = [host for host, key in self._present.items() if ages.get(key, AWAY_S) < AWAY_S]
        return [host for host in there if self._board.get(b.gone_key(host)) is None]

    def _lacks(self) -> bool:
        """Check the hosts. Return True if a host is refused and has no accepted process: no engine can start
        then."""
        self._check()
        return bool(self._refused)

    def _check(self) -> None:
        """Accept or refuse new host processes: settings must match, and a host number must be unique."""
        for host in self._hosts:
            ages = self._board.ages(b.settings_key(host))
            if not ages:
                self._remind_of(host)
            for key, age in ages.items():
                if key in self._answered:
                    continue
                present = self._present.get(host)
                # An entry no longer posted belongs to a dead process. Only then may another take the number.
                if present is None or ages.get(present, AWAY_S) >= AWAY_S:
                    self._meet(host, key)
                elif age < AWAY_S / 2 and self._waits(key):
                    self._answer(
                        host, key, f"another host has --node-rank {host}: give each host its own number"
                    )

    def _waits(self, key: str) -> bool:
        """Return True if a process has waited long enough for the other process with its number to be
        gone."""
        return time.monotonic() - self._waiting.setdefault(key, time.monotonic()) > 2 * AWAY_S

    def _meet(self, host: int, key: str) -> None:
        """Accept the host process with settings entry ``key``, or refuse it for other settings or another
        version. Post the answer. An accepted process replaces the host's former process.
        """
        data = self._board.get(key)
        try:
            theirs = msgspec.msgpack.decode(data or b"", type=dict[str, str])
            compare(self._settings, theirs, "host 0", f"host {host}")
        except (ConfigError, msgspec.MsgspecError) as error:
            why = (
                error.message
                if isinstance(error, ConfigError)
                else f"host {host} runs another version of weft"
            )
            if host not in self._present:
                self._refused[host] = why
            self._answer(host, key, why)
            return
        log.info("host %d has connected", host)
        self._refused.pop(host, None)
        before, self._present[host] = self._present.get(host), key
        if before is not None:
            self._board.drop(before)
            self._board.drop(b.answer_key(host, _mark(before)))
        self._answer(host, key, "")

    def _answer(self, host: int, key: str, why: str) -> None:
        if why:
            log.error("host %d is rejected: %s", host, why)
        self._answered.add(key)
        self._board.post(b.answer_key(host, _mark(key)), why.encode())

    def _remind_of(self, host: int) -> None:
        """Log that the server waits for ``host``, every ``REMIND_S`` seconds over all hosts."""
        if time.monotonic() > self._remind:
            self._remind = time.monotonic() + REMIND_S
            refused = self._board.refused
            why = f"a host at {refused} has a wrong --group-secret" if refused else "no connection so far"
            log.info("waiting for host %d: %s", host, why)


class RemoteEngine:
    """One incarnation of an engine process on another host, with the needed methods of
    ``subprocess.Popen``."""

    def __init__(
        self,
        board: Board,
        replica: int,
        incarnation: int,
        refused: Callable[[], bool],
        end: Callable[[int], None],
    ) -> None:
        """Create the handle. ``refused()`` is True if the engine can never start. ``end(incarnation)``
        requests the end of the process."""
        self._board = board
        self._replica = replica
        self.incarnation = incarnation
        self._refused = refused
        self._end = end
        self._address: str | None = None

    def endpoint(self) -> str | None:
        """Return the address of the engine; None until the engine listens."""
        if self._address is None:
            self._address = self._listens()
        return self._address

    def poll(self) -> int | None:
        """Return the exit status once the engine has ended: ``REFUSED`` if its host was refused, 1 after a
        restart of its host. None while running or still to be started.
        """
        if self._refused():
            return REFUSED
        data = self._board.get(b.ended_key(self._replica))
        if (
            data is not None
            and (ended := msgspec.msgpack.decode(data, type=b.EngineEnded)).incarnation == self.incarnation
        ):
            return ended.status
        # A restarted host starts the wanted incarnation again. The process is another one, so the observed
        # process has ended.
        moved = self._address is not None and self._listens() not in (None, self._address)
        return 1 if moved else None

    def kill(self) -> None:
        """Request the end of the process, unless another incarnation has begun. Does not wait."""
        self._end(self.incarnation)

    def wait(self, timeout: float) -> int:
        """Block until the engine has ended and return the exit status.

        Raise subprocess.TimeoutExpired after ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"head {self._replica}", timeout)
            time.sleep(_LOOK)
        return status

    def _listens(self) -> str | None:
        """Return the published address of this incarnation, or None."""
        data = self._board.get(b.engine_key(self._replica))
        if data is None:
            return None
        listening = msgspec.msgpack.decode(data, type=b.Listening)
        return listening.address if listening.incarnation == self.incarnation else None


def host_settings(config: EngineConfig) -> dict[str, str]:
    """Return the settings that must be equal on all hosts, including the version of frames.

    Excludes the KV cache: the cache of each replica has the size that its host has room for.
    """
    settings = {name: value for name, value in shared_settings(config).items() if not name.startswith("kv.")}
    return {**settings, "version of frames": str(frames.VERSION)}


def _mark(key: str) -> str:
    return key.rpartition("/")[2]
