"""A zmq socket on the event loop, without a future per message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq

READ_AT_ONCE = 64
"""Received messages handled before other tasks of the event loop run."""
READ_S = 0.01
"""Seconds of handling after which other tasks of the event loop run, even if more messages were received."""
LOOK_S = 0.2
"""Seconds between two tries to send while zmq's queue is full, if the socket does not signal."""


class Channel:
    """A zmq socket on the event loop. Each received message goes to a function at once: a future per message,
    as in ``zmq.asyncio``, takes longer than the work for the message.
    """

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        """Begin to receive. ``take`` must not raise."""
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        """Set at each signal of the socket: messages have come, or have left."""
        self._open = True
        self.behind = False
        """True while messages are read that waited for a turn: the event loop is slower than the sender."""
        self._cut = False
        """True after a read that ended before zmq's queue was empty."""
        self._next: asyncio.Handle | None = None
        """The next read without a signal, if one is due."""
        self._loop.add_reader(socket.fileno(), self._look)
        self._read_soon()  # messages that came before send no signal any more

    def close(self) -> None:
        """Stop to receive. The socket stays open. Idempotent."""
        if self._open:
            self._open = self.behind = False
            self._loop.remove_reader(self._socket.fileno())

    async def send(self, frames: tuple[bytes, ...]) -> None:
        """Send one message, and wait while zmq's queue is full. Several frames are not copied: the buffers
        must stay unchanged until sent.
        """
        while True:
            self._changed.clear()
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)
                return
            except zmq.Again:
                pass
            finally:
                # A send, also into a full queue, may use up the signal for received messages.
                self._read_soon()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)

    def _look(self) -> None:
        """Take received messages after a signal of the socket, and wake a waiting ``send``."""
        self._changed.set()
        self._read()

    def _read_soon(self) -> None:
        """Read after the callbacks that are due now. Several calls cause one read."""
        if self._next is None:
            self._next = self._loop.call_soon(self._read_next)

    def _read_next(self) -> None:
        self._next = None
        self._read()

    def _read(self) -> None:
        """Take received messages. The signal comes once for many messages, so read until none is left."""
        until = self._loop.time() + READ_S
        cut, self._cut = self._cut, False
        for _ in range(READ_AT_ONCE):
            if not self._open:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.behind = False
                return
            self.behind = cut
            self._take(frames)
            if self._loop.time() > until:
                break
        self._cut = True
        self._read_soon()
