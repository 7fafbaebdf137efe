"""The rendezvous store of a group over several hosts: a small table in the head's process.

    weft engine (head) ── RendezvousStore ◄── RendezvousClient ── weft engine --join, engines, ranks

Every entry has one writer. A client sends all its entries with every poll, so an entry that was lost, or
overwritten by an ended process, is correct again after the next poll. Clients that know the group's secret
may read and write (CURVE: see ``weft.parallel.secret``). ``weft.types.rendezvous`` lists the entries.
"""

from __future__ import annotations

import math
import secrets
import threading
import time

import msgspec
import zmq

from weft.common.counted_log import CountedLog
from weft.common.log import get_logger
from weft.parallel.address import listen_at
from weft.parallel.handshakes import Handshakes
from weft.parallel.secret import CurveKeys, admit_ranks
from weft.types.rendezvous import MOST_BYTES, Ask, Table

log = get_logger(__name__)

POLL_S = 0.1
"""Seconds between two polls of a client."""
RENEW_S = 3.0
"""Seconds without an answer after which a client replaces its connection."""
REFUSED_S = 30.0
"""Seconds for which the address of a rejected connection is reported. A port scan is rejected, too."""
_TURN_MS = 100
_QUEUE = 1000


class RendezvousStore:
    """The table, and a thread that serves clients. All methods are safe from any thread."""

    def __init__(self, address: str, keys: CurveKeys, patience: float = 0.0) -> None:
        """Listen at ``address``, and start the thread. Peers without ``keys`` are refused.

        ``patience``: seconds to wait for the port, which a killed process may still have. Raise ConfigError.
        """
        self.head = secrets.randbits(63)
        """Random number of this store, as clients see the store."""
        self._context = zmq.Context()
        self._doorman = admit_ranks(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        keys.guard_engine(self._socket)
        self._handshakes = Handshakes(self._socket)
        self._trouble = CountedLog(log)
        self._refused, self._refused_at = "", -math.inf
        try:
            listen_at(self._socket, address, patience)
        except BaseException:
            self._end()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._lock = threading.Lock()
        self._entries: dict[str, bytes] = {}
        self._heard: dict[str, float] = {}
        """Time of the last post of each entry."""
        self._version = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="weft-rendezvous", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> str:
        """Address of the last failed handshake; "" without one within ``REFUSED_S``."""
        return self._refused if time.monotonic() - self._refused_at < REFUSED_S else ""

    def post(self, key: str, value: bytes) -> None:
        """Set the entry ``key``."""
        with self._lock:
            self._post(key, value)

    def drop(self, key: str) -> None:
        """Forget an entry until the next post. Idempotent."""
        with self._lock:
            self._heard.pop(key, None)
            if self._entries.pop(key, None) is not None:
                self._version += 1

    def look(self, prefix: str) -> dict[str, tuple[bytes, float]]:
        """Return the entries with ``prefix`` in order of first post: value, and seconds since the last
        post."""
        now = time.monotonic()
        with self._lock:
            return {
                key: (self._entries[key], now - at)
                for key, at in self._heard.items()
                if key.startswith(prefix)
            }

    def close(self) -> None:
        """End the thread."""
        self._stop = True
        self._thread.join(5.0)

    def _post(self, key: str, value: bytes) -> None:
        self._heard[key] = time.monotonic()
        if self._entries.get(key) != value:
            self._entries[key] = value
            self._version += 1

    def _run(self) -> None:
        """Serve clients until ``close``. Refused connections are logged, and ``refused`` has the last one."""
        poller = zmq.Poller()
        # the monitor gives addresses only of live connections
        for one in (self._socket, self._handshakes.monitor):
            poller.register(one, zmq.POLLIN)
        try:
            while not self._stop:
                if self._socket in dict(poller.poll(_TURN_MS)):
                    self._serve(self._socket.recv_multipart())
                for address in self._handshakes.look():
                    self._refused, self._refused_at = address, time.monotonic()
                    self._trouble.warn("rejected a connection from %s: wrong --group-secret", address)
        finally:
            self._end()

    def _serve(self, frames: list[bytes]) -> None:
        """Post the entries of one poll and answer with the table. An invalid poll is logged and dropped."""
        try:
            client, body = frames
            ask = msgspec.msgpack.decode(body, type=Ask)
        except (ValueError, msgspec.MsgspecError) as error:
            self._trouble.warn(
                "dropped an invalid request to the rendezvous store (%s)", type(error).__name__
            )
            return
        with self._lock:
            for key, value in ask.entries.items():
                self._post(key, value)
            known = (ask.head, ask.version) == (self.head, self._version)
            entries = None if known else self._entries
            answer = Table(number=ask.number, head=self.head, version=self._version, entries=entries)
            data = msgspec.msgpack.encode(answer)
        try:
            self._socket.send_multipart([client, data], zmq.NOBLOCK)
        except zmq.ZMQError:  # the client does not read; the client may ask again
            return

    def _end(self) -> None:
        self._handshakes.close()
        self._socket.close(0)
        self._doorman.stop()
        self._context.term()


class RendezvousClient:
    """A client of the rendezvous store, with a thread that polls. All methods are safe from any thread."""

    def __init__(self, address: str, keys: CurveKeys) -> None:
        """Connect to the store at ``address`` in the background, and start the thread."""
        self._address, self._keys = address, keys
        self._context = zmq.Context()
        self._posted: dict[str, bytes] = {}
        self._wake = threading.Event()
        self._stop = False
        self._number = self._answered = 0
        self.entries: dict[str, bytes] = {}
        """The table as last received."""
        self.head = 0
        """Number of the head that sent the table; 0 before the first answer."""
        self._version = 0
        self.why = ""
        """The reason why the store does not answer; "" while connected."""
        self.heard = time.monotonic()
        """Time of the last answer; before the first answer, time of the client's creation."""
        self._trouble = CountedLog(log)
        self._socket, self._handshakes = self._connect()
        self._connected = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="weft-rendezvous", daemon=True)
        self._thread.start()

    def post(self, key: str, value: bytes) -> None:
        """Set the entry ``key`` in every later poll."""
        self._posted = {**self._posted, key: value}
        self._wake.set()

    def wait(self, key: str, patience: float) -> bytes | None:
        """Return the entry ``key`` of the present table. Blocks up to ``patience`` seconds for the entry."""
        until = time.monotonic() + patience
        while (found := self.entries.get(key)) is None and time.monotonic() < until:
            time.sleep(POLL_S / 2)
        return found

    @property
    def silent(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self.heard

    def close(self) -> None:
        """End the thread."""
        self._stop = True
        self._wake.set()
        self._thread.join(5.0)

    def _connect(self) -> tuple[zmq.Socket[bytes], Handshakes]:
        """Return a socket that connects in the background. Raise zmq.ZMQError."""
        socket = self._context.socket(zmq.DEALER)
        try:
            _configure(socket)
            self._keys.guard_rank(socket)
            handshakes = Handshakes(socket)
            socket.connect(self._address)
        except BaseException:
            socket.close(0)
            raise
        return socket, handshakes

    def _disconnect(self) -> None:
        self._handshakes.close()
        self._socket.close(0)

    def _run(self) -> None:
        """Poll the store until ``close``."""
        while not self._stop:
            try:
                self._ask()
            except zmq.ZMQError as error:  # for example no free file descriptor: try again
                self._trouble.warn("trouble with the connection to the head (%s)", error)
            self._wake.wait(POLL_S)
            self._wake.clear()
        self._disconnect()
        self._context.term()

    def _ask(self) -> None:
        """Send the entries, unless an earlier poll is unanswered, and read answers for up to ``POLL_S``."""
        quiet = time.monotonic() - max(self.heard, self._connected)
        waits = self._answered < self._number
        # After a long silence, replace the connection: the connection may be dead, and answers may be lost.
        if waits and quiet > RENEW_S:
            socket, handshakes = self._connect()
            self._disconnect()
            self._socket, self._handshakes, self._connected = socket, handshakes, time.monotonic()
            waits = False
        if not waits:
            self._number += 1
            ask = Ask(number=self._number, entries=self._posted, head=self.head, version=self._version)
            try:
                self._socket.send(msgspec.msgpack.encode(ask), zmq.NOBLOCK)
            except zmq.Again:
                self._answered = self._number
        while self._socket.poll(0 if self._answered == self._number else int(POLL_S * 1000)):
            self._take(self._socket.recv())
        self._handshakes.look()
        why = self._handshakes.why or "the head is connected but does not answer"
        self.why = why if self._answered < self._number or self.silent > RENEW_S else ""

    def _take(self, data: bytes) -> None:
        """Store an answer. Invalid and older answers change no entry."""
        try:
            table = msgspec.msgpack.decode(data, type=Table)
        except msgspec.MsgspecError:
            return
        self.heard = time.monotonic()
        if table.number >= self._answered or table.head != self.head:
            self._answered = max(self._answered, table.number)
            if table.entries is not None:
                self.entries, self.head, self._version = table.entries, table.head, table.version


def _configure(socket: zmq.Socket[bytes]) -> None:
    """Set limits of queues and messages, and pings that detect a dead connection."""
    socket.setsockopt(zmq.SNDHWM, _QUEUE)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
