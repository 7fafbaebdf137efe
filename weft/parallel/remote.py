"""Heads on other hosts, as the host with the front sees them.

It says on the board which life each of them should be in, and the hosts that they belong to make it so: see
``weft.launch.host``. A host that is silent is waited for; its heads' links tell whoever needs them.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable

import msgspec

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.group import compare, shared_settings
from weft.config.hosts import heads_on, host_of
from weft.config.resolved import EngineConfig
from weft.parallel.board import Board, board_place, open_board
from weft.types import board as b

log = get_logger(__name__)

REMIND_S = 30.0
"""Seconds between two lines in the log about a host that has not come."""
REFUSED = 2
"""Status of heads whose host is refused, as of a head that refuses its configuration."""
_LOOK = 0.05


class RemoteHeads:
    """The board of a server, and what its front needs of heads on other hosts."""

    def __init__(self, config: EngineConfig) -> None:
        """Listens at ``--rdzv``. Raises ConfigError."""
        parallel = config.parallel
        self._parallel = parallel
        self._settings = host_settings(config)
        _, self.keys = board_place(parallel)
        self._board = open_board(parallel)
        # Hosts outlive a server: what they say of one's heads must not be taken for another's.
        first = secrets.randbits(48) << 14
        self._lives = {r: first for node in range(1, parallel.nnodes) for r in heads_on(parallel, node)}
        self._hosts = range(1, parallel.nnodes)
        self._said: dict[int, bytes] = {}
        """Host -> its settings as they were compared last."""
        self._refused: dict[int, str] = {}
        """Host -> why, of those that were never accepted: later it is waited for one that can be."""
        self._accepted: set[int] = set()
        self._remind = time.monotonic() + REMIND_S

    def __contains__(self, replica: int) -> bool:
        """Whether its head is on another host."""
        return replica in self._lives

    def start(self, replica: int) -> RemoteHead:
        """Has the head of ``replica`` started, in place of whatever runs. Does not wait."""
        self._lives[replica] += 1
        self._want(replica, self._lives[replica])
        node = host_of(self._parallel, replica * self._parallel.tensor_parallel_size)
        return RemoteHead(self._board, replica, self._lives[replica], self._refusal(node), self._end(replica))

    def close(self, seconds: float, status: int = 0) -> None:
        """Tells all hosts that the server ends, and gives them ``seconds`` to read it."""
        self._check()
        self._board.post(b.OVER, msgspec.msgpack.encode(status))
        until = time.monotonic() + seconds
        while self._reading() and time.monotonic() < until:
            time.sleep(_LOOK)
        for host in self._reading():
            log.warning("host %d did not read that the server ends", host)
        self._board.close()

    def _want(self, replica: int, life: int) -> None:
        self._board.post(b.wanted_key(replica), msgspec.msgpack.encode(life))

    def _end(self, replica: int) -> Callable[[int], None]:
        def end(life: int) -> None:
            if self._lives[replica] == life:
                self._want(replica, 0)

        return end

    def _reading(self) -> list[int]:
        """Hosts that came, and have not read that the server ends."""
        come = [host for host in self._hosts if self._board.get(b.settings_key(host)) is not None]
        return [host for host in come if self._board.get(b.gone_key(host)) is None]

    def _refusal(self, host: int) -> Callable[[], bool]:
        def refused() -> bool:
            self._check()
            return host in self._refused

        return refused

    def _check(self) -> None:
        """Compares the settings of hosts that came, and answers them."""
        for host in self._hosts:
            data = self._board.get(b.settings_key(host))
            if data is None:
                self._remind_of(host)
            elif data != self._said.get(host):
                self._said[host] = data
                self._answer(host, data)

    def _answer(self, host: int, data: bytes) -> None:
        try:
            theirs = msgspec.msgpack.decode(data, type=dict[str, str])
            compare(self._settings, theirs, "host 0", f"host {host}")
        except (ConfigError, msgspec.MsgspecError) as error:
            why = error.message if isinstance(error, ConfigError) else f"host {host} is of another version"
            log.error("host %d is refused: %s", host, why)
            if host not in self._accepted:
                self._refused[host] = why
            self._board.post(b.answer_key(host), why.encode())
        else:
            log.info("host %d is there", host)
            self._accepted.add(host)
            self._refused.pop(host, None)
            self._board.post(b.answer_key(host), b"")

    def _remind_of(self, host: int) -> None:
        if time.monotonic() > self._remind:
            self._remind = time.monotonic() + REMIND_S
            log.info("host %d has not come yet", host)


class RemoteHead:
    """One life of a head on another host. It has what is needed of a ``subprocess.Popen``."""

    def __init__(
        self, board: Board, replica: int, life: int, refused: Callable[[], bool], end: Callable[[int], None]
    ) -> None:
        self._board, self._replica, self.life = board, replica, life
        self._refused, self._end = refused, end
        self._address: str | None = None

    def endpoint(self) -> str | None:
        """Where it listens; None as long as it does not."""
        if self._address is None:
            self._address = self._listens()
        return self._address

    def poll(self) -> int | None:
        """Its status when it has ended; None while it runs, or will run when its host comes."""
        if self._refused():
            return REFUSED
        data = self._board.get(b.ended_key(self._replica))
        if data is not None and (ended := msgspec.msgpack.decode(data, type=b.Ended)).life == self.life:
            return ended.status
        # Its host was started anew and did as it had been told: that is another process.
        moved = self._address is not None and self._listens() not in (None, self._address)
        return 1 if moved else None

    def kill(self) -> None:
        """Has it ended, unless another life has begun. Does not wait."""
        self._end(self.life)

    def wait(self, timeout: float) -> int:
        """Its status. Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"head {self._replica}", timeout)
            time.sleep(_LOOK)
        return status

    def _listens(self) -> str | None:
        data = self._board.get(b.head_key(self._replica))
        if data is None:
            return None
        listening = msgspec.msgpack.decode(data, type=b.Listening)
        return listening.address if listening.life == self.life else None


def host_settings(config: EngineConfig) -> dict[str, str]:
    """What all hosts must have alike. Each replica has a cache of its own, of what its host has room for."""
    return {name: value for name, value in shared_settings(config).items() if not name.startswith("kv.")}
