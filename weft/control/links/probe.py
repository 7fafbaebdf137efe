"""An owner's connection to an engine process, besides the links of API servers: shows if the engine answers
and has work.
"""

from __future__ import annotations

import contextlib
import time

import msgspec
import zmq

from weft.control.links.link import Address
from weft.types import messages as m

LINGER_MS = 500
GREET_S = 2.0
"""Seconds between two Hellos to a running engine process. A new connection needs a new Hello."""


class EngineProbe:
    """One connection to the process at an address. No method blocks, except ``close`` briefly. Used from one
    thread.
    """

    def __init__(self, address: Address) -> None:
        """``address``: of the process. Nothing is connected before the first ``look``."""
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self.answers = False
        """True if the engine process has loaded its model and has answered."""
        self.idle: bool | None = None
        """True if the engine process has no sequence and no open transfer, according to the last heartbeat
        found by the last ``look``. None if ``look`` found no heartbeat.
        """
        self.stats = m.EngineStats()
        """Counters of the last heartbeat."""
        self.moved = time.monotonic()
        """Time of the last proof of progress: a changed step counter, or an idle heartbeat."""
        self._ends = False
        self._greeted = 0.0

    def look(self) -> None:
        """Handle received messages, and connect or greet if due.

        Sets ``answers`` and ``idle``. Invalid messages are dropped.
        """
        self.idle = None
        if self._socket is None and not self._connect():
            return
        assert self._socket is not None
        if self.answers and time.monotonic() - self._greeted >= GREET_S:
            self._greet()
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                with contextlib.suppress(ValueError, msgspec.MsgspecError):
                    (frame,) = frames
                    self._take(m.decode_to_front(frame))

    @property
    def connected(self) -> bool:
        """True if the address of the engine process is known."""
        return self._socket is not None

    def quit(self) -> None:
        """Make the engine process finish the step and end."""
        self._ends = True
        self._send(m.Shutdown())

    def close(self) -> None:
        """Send a goodbye, unless the engine process ends. Idempotent."""
        # Nobody receives a goodbye: with a linger time, destroy would block.
        if self._ends or self._address.process.poll() is not None:
            self._context.destroy(0)
            return
        self._send(m.Goodbye())
        self._context.destroy(LINGER_MS)

    def _connect(self) -> bool:
        """Connect and greet. Return False while the address is unknown."""
        endpoint = self._address.endpoint
        place = endpoint if isinstance(endpoint, str) else endpoint()
        if place is None:
            return False
        self._socket = self._context.socket(zmq.DEALER)
        if self._address.keys is not None:
            self._address.keys.guard_rank(self._socket)
        self._socket.connect(place)
        self._greet()
        return True

    def _greet(self) -> None:
        self._greeted = time.monotonic()
        self._send(m.Hello(versions=(m.OLDEST, m.VERSION), front="owner"))

    def _send(self, message: m.ToEngine) -> None:
        if self._socket is not None and not self._socket.closed:
            with contextlib.suppress(zmq.Again):
                self._socket.send(m.encode(message), zmq.NOBLOCK)

    def _take(self, message: m.ToFront) -> None:
        """Note an answer in ``answers``, or the load of a heartbeat in ``idle``."""
        if isinstance(message, m.Welcome):
            self.answers = True
        elif isinstance(message, m.Heartbeat):
            stats = message.stats
            if message.idle or stats.steps != self.stats.steps:
                self.moved = time.monotonic()
            self.stats = stats
            moving = (stats.transfers, stats.embedding_transfers)
            count = sum(transfers.open for transfers in moving if transfers is not None)
            self.idle = not (stats.running or stats.waiting or count)
