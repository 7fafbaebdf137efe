"""Put a TCP port in front of a Unix socket or another port, and reset, refuse or silence connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct


class TcpProxy:
    """Run the proxy in one event loop. ``async with`` starts and ends the proxy."""

    def __init__(self, target: str) -> None:
        """``target``: ``ipc://PATH`` or ``tcp://127.0.0.1:PORT``."""
        self.target = target
        self.accepted = 0
        self.refuses = False
        """True to reset every new connection at once, like a firewall's REJECT."""
        self._open: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        """Client's end -> target's end."""
        self._silent: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Both ends of each connection read a reset."""
        for client, target in self._open.items():
            _abort(client)
            _abort(target)
        self._open.clear()

    def go_silent(self) -> None:
        """Drop all further bytes on the open connections. New connections are unaffected."""
        self._silent.update(self._open)

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refuses:
            _abort(client)
            return
        scheme, _, place = self.target.partition("://")
        if scheme == "ipc":
            answers, target = await asyncio.open_unix_connection(place)
        else:
            host, _, port = place.rpartition(":")
            answers, target = await asyncio.open_connection(host, int(port))
        self._open[client] = target
        for source, sink in ((reader, target), (answers, client)):
            task = asyncio.create_task(self._pump(client, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, client: asyncio.StreamWriter, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if client not in self._silent:
                    sink.write(data)
                    await sink.drain()
        if client not in self._silent:
            sink.close()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Closes with a reset."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
