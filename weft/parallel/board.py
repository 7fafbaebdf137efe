"""The rendezvous store on host 0: a table in which hosts and engine processes publish state for each other.

The table has small entries, each with one writer. Clients that know the group's secret may write and read
(CURVE: see ``weft.parallel.secret``). A writer sends all its entries with every query. So an entry that was
lost, or overwritten by a dead process, is right again after the next query. ``weft.types.board`` lists the
entries.
"""

from __future__ import annotations

import secrets
import threading
import time

import msgspec
import zmq

from weft.common.counted_log import CountedLog
from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.config.hosts import meeting_place
from weft.config.sections.all import ParallelSection
from weft.parallel.address import listen_at, own_address, tcp
from weft.parallel.handshakes import Handshakes
from weft.parallel.secret import CurveKeys, admit_ranks, read_keys
from weft.types.board import MOST_BYTES, Ask, Table

log = get_logger(__name__)

RENEW_S = 3.0
"""Seconds without an answer after which a client reconnects."""
_TURN_MS = 100
_QUEUE = 1000


class Board:
    """The table, and a thread that serves clients. ``post`` and ``get`` may be called from any thread."""

    def __init__(self, address: str, keys: CurveKeys) -> None:
        """Listen at ``address``, and start the thread.

        Peers without ``keys`` are refused. Raise ConfigError if the address is taken.
        """
        self._context = zmq.Context()
        self._doorman = admit_ranks(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        keys.guard_engine(self._socket)
        self._handshakes = Handshakes(self._socket)
        self._strangers = CountedLog(log)
        self.refused = ""
        """Address of the last refused connection; "" if none was refused."""
        try:
            listen_at(self._socket, address, 0.0)
        except BaseException:
            self._end()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._lock = threading.Lock()
        self._entries: dict[str, bytes] = {}
        self._heard: dict[str, float] = {}
        """Time of the last post of each entry, including posts of an equal value."""
        self._incarnation = secrets.randbits(63)
        self._version = 1
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="weft-board", daemon=True)
        self._thread.start()

    def post(self, key: str, value: bytes) -> None:
        """Set the entry ``key``."""
        with self._lock:
            self._post(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the entry ``key``; None if absent."""
        with self._lock:
            return self._entries.get(key)

    def ages(self, prefix: str) -> dict[str, float]:
        """Return the keys with ``prefix`` in order of first post, each with the seconds since its last
        post."""
        now = time.monotonic()
        with self._lock:
            return {key: now - at for key, at in self._heard.items() if key.startswith(prefix)}

    def drop(self, key: str) -> None:
        """Forget an entry until the next post. Idempotent."""
        with self._lock:
            self._heard.pop(key, None)
            if self._entries.pop(key, None) is not None:
                self._version += 1

    def close(self) -> None:
        """End the thread. Answers already queued are still delivered, for up to one second."""
        self._stop = True
        self._thread.join(5.0)

    def _post(self, key: str, value: bytes) -> None:
        self._heard[key] = time.monotonic()
        if self._entries.get(key) != value:
            self._entries[key] = value
            self._version += 1

    def _run(self) -> None:
        """Serve clients until ``close``. Refused connections are logged and stored in ``refused``."""
        poller = zmq.Poller()
        # the monitor gives addresses only of live connections
        for one in (self._socket, self._handshakes.monitor):
            poller.register(one, zmq.POLLIN)
        try:
            while not self._stop:
                if self._socket in dict(poller.poll(_TURN_MS)):
                    self._serve(self._socket.recv_multipart())
                for address in self._handshakes.look():
                    self.refused = address
                    self._strangers.say("rejected a connection from %s: wrong --group-secret", address)
        finally:
            self._end()

    def _serve(self, frames: list[bytes]) -> None:
        """Post the entries of one request and answer with the table, or without entries if the client has the
        present version. An invalid request is logged and dropped.
        """
        try:
            client, body = frames
            ask = msgspec.msgpack.decode(body, type=Ask)
        except (ValueError, msgspec.MsgspecError) as error:
            self._strangers.say(
                "dropped an invalid request to the rendezvous store (%s)", type(error).__name__
            )
            return
        with self._lock:
            for key, value in ask.entries.items():
                self._post(key, value)
            # A client with the present version gets an answer without entries.
            known = (ask.board, ask.version) == (self._incarnation, self._version)
            entries = {} if known else dict(self._entries)
            answer = Table(number=ask.number, board=self._incarnation, version=self._version, entries=entries)
        try:
            self._socket.send_multipart([client, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)
        except zmq.ZMQError:  # the client does not read; the client may ask again
            return

    def _end(self) -> None:
        self._handshakes.close()
        self._socket.close()
        self._doorman.stop()
        self._context.term()


class BoardClient:
    """A client of the rendezvous store. Used from one thread at a time."""

    def __init__(self, address: str, keys: CurveKeys) -> None:
        """Connect to the store at ``address`` in the background."""
        self._address = address
        self._keys = keys
        self._context = zmq.Context()
        self._connect()
        self._posted: dict[str, bytes] = {}
        self._number = 0
        self._answered = 0
        self._asked = -RENEW_S
        self.entries: dict[str, bytes] = {}
        """The table as last received."""
        self.board = self.version = 0
        """Id and version of the received table."""
        self.heard = time.monotonic()
        """Time of the last answer; before the first answer, time of the client's creation."""

    def post(self, key: str, value: bytes) -> None:
        """Set the entry ``key``. Every later ``look`` sends the entry."""
        self._posted[key] = value

    def look(self, wait: float) -> bool:
        """Send the posted entries and receive answers, into ``entries``.

        Return True if the query of this call was answered.

        Wait up to ``wait`` seconds for the answer. With 0, only read answers that have come, and send a query
        unless an earlier query is outstanding. After a long silence, reconnect.
        """
        self._take(0)
        if wait <= 0 and self._answered < self._number and time.monotonic() - self._asked < RENEW_S:
            return False
        quiet = time.monotonic() - max(self.heard, self._connected)
        self._handshakes.look()
        # After a long silence, reconnect: zmq may hold a dead connection, and answers may be lost.
        if self._answered < self._number and quiet > RENEW_S:
            self._close(0)
            self._connect()
        self._number += 1
        self._asked = time.monotonic()
        ask = Ask(number=self._number, board=self.board, version=self.version, entries=self._posted)
        try:
            self._socket.send(msgspec.msgpack.encode(ask), zmq.NOBLOCK)
        except zmq.Again:
            return False
        until = time.monotonic() + wait
        while self._answered < self._number and (left := until - time.monotonic()) > 0:
            self._take(left)
        return self._answered == self._number

    def tell(self, key: str, value: bytes, patience: float) -> None:
        """Post an entry, and wait until the store has the entry. Raise EngineDead after about ``patience``
        seconds."""
        self.post(key, value)
        until = time.monotonic() + patience
        while not self.look(min(RENEW_S, patience)):
            if time.monotonic() > until:
                where = f"host 0 did not answer at {self._address} within {patience:g} s"
                raise EngineDead(f"{where}: {self.why}")

    @property
    def why(self) -> str:
        """The reason why the store does not answer, as far as this end knows."""
        return self._handshakes.why or "host 0 is connected but does not answer"

    def close(self) -> None:
        self._close(1000)
        self._context.term()

    def _close(self, linger: int) -> None:
        self._handshakes.close()
        self._socket.close(linger)

    def _connect(self) -> None:
        """Open a socket and connect in the background."""
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._keys.guard_rank(self._socket)
        self._handshakes = Handshakes(self._socket)
        self._socket.connect(self._address)
        self._connected = time.monotonic()

    def _take(self, wait: float) -> None:
        """Store all received answers; wait up to ``wait`` seconds for the first.

        Invalid and older answers change no entry.
        """
        while self._socket.poll(max(int(wait * 1000), 0)):
            wait = 0
            try:
                table = msgspec.msgpack.decode(self._socket.recv(), type=Table)
            except msgspec.MsgspecError:
                continue
            self.heard = time.monotonic()
            self._answered = max(self._answered, table.number)
            # A new table id means that host 0 restarted, so the version counts from anew.
            if table.board != self.board or table.version > self.version:
                self.entries = table.entries
                self.board = table.board
                self.version = table.version


def board_place(parallel: ParallelSection) -> tuple[str, CurveKeys]:
    """Return the address and the keys of the rendezvous store. Raise ConfigError."""
    assert parallel.group_secret is not None, "checked when the configuration was resolved"
    return tcp(*meeting_place(parallel)), read_keys(parallel.group_secret)


def open_board(parallel: ParallelSection) -> Board:
    """Open the rendezvous store; called on host 0 of the server. Raise ConfigError."""
    where, port = meeting_place(parallel)
    return Board(tcp(own_address(where, port), port), board_place(parallel)[1])


def _configure(socket: zmq.Socket[bytes]) -> None:
    """Set limits of queues and messages, and pings that detect a dead connection."""
    socket.setsockopt(zmq.SNDHWM, _QUEUE)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
