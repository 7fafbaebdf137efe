"""A zmq socket on the event loop, without a future per message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq

READ_AT_ONCE = 64
"""Received messages handled before other tasks of the event loop run."""
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
        self._loop.add_reader(socket.fileno(), self._look)
        self._loop.call_soon(self._look)  # messages that came before send no signal any more

    def close(self) -> None:
        """Stop to receive. The socket stays open. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())

    async def send(self, frames: tuple[bytes, ...]) -> None:
        """Send one message, and wait while zmq's queue is full. Several frames are not copied: the buffers
        must stay unchanged until sent.
        """
        while True:
            self._changed.clear()
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)
                break
            except zmq.Again:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_S)
        # A send uses up the signal for received messages.
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Take received messages. The signal comes once for many messages, so read until none is left."""
        self._changed.set()
        for _ in range(READ_AT_ONCE):
            if not self._open:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._loop.call_soon(self._look)
