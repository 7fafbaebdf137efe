"""The socket of an engine process, opened before the imports and the load, so API servers see a running
process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from weft.common.errors import ConfigError
from weft.config.resolved import EngineConfig
from weft.parallel.secret import CurveKeys, admit_ranks, read_keys
from weft.types import messages as m

SEND_QUEUE = 10_000
"""Maximum unread messages of an API server. Beyond the limit the API server counts as gone."""


class Listener:
    """The socket of an engine process. zmq's own thread answers pings, even while the process loads or
    computes.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        """Bind a socket to ``endpoint``. ``address`` is the bound address.

        ``endpoint``: an ``ipc://`` path in a folder private to the user, or loopback tcp. With ``keys`` also
        an address of the local host; API servers without the keys are then rejected. Raises zmq.ZMQError.
        """
        self._context = zmq.Context()
        self._doorman = admit_ranks(self._context, keys) if keys is not None else None
        socket = self._context.socket(zmq.ROUTER)
        if keys is not None:
            keys.guard_engine(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        socket.bind(endpoint)
        self.socket = socket
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> list[Any]:
        """Return the frames of the next message. The first frame identifies the sender. Raises zmq.Again
        without a message.

        The first two frames are bytes. Further frames may be large and are views without a copy.
        """
        frames: list[Any] = [self.socket.recv(zmq.NOBLOCK)]
        while self.socket.getsockopt(zmq.RCVMORE):
            frames.append(self.socket.recv() if len(frames) < 2 else self.socket.recv(copy=False).buffer)
        return frames

    def close(self) -> None:
        """Close the socket. Sent messages are still delivered for up to one second."""
        self.socket.close()
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()


def listen(config: EngineConfig, endpoint: str) -> Listener:
    """Open the socket at ``endpoint`` and return the listener. For API servers on other hosts, write the
    address to the file that the configuration names. Raises ConfigError."""
    if config.address_file:
        return _listen_for_hosts(config, endpoint)
    return Listener(endpoint)


def _listen_for_hosts(config: EngineConfig, endpoint: str) -> Listener:
    """Open the socket at a port that the system chooses, and write the address to ``config.address_file``.

    Raises ConfigError if this host does not have the address.
    """
    assert config.parallel.group_secret is not None, "checked when the configuration was resolved"
    try:
        listener = Listener(endpoint, read_keys(config.parallel.group_secret))
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--advertise {config.parallel.advertise}: cannot listen there ({error.strerror}); give an "
            "address of this host",
            param="--advertise",
        ) from error
    file = Path(config.address_file)
    partial = file.with_suffix(".part")
    partial.write_text(listener.address)
    partial.replace(file)
    return listener
