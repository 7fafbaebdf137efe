"""Addresses of this host, as other hosts of a group see it."""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

import zmq

from weft.common.errors import ConfigError
from weft.common.log import get_logger

log = get_logger(__name__)

_AGAIN = 0.1


def own_address(host: str, port: int) -> str:
    """The numeric address that this host has on the way to ``host``; of its own name, that address.

    Nothing is sent. Raises ConfigError when there is no way.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--rdzv: {host} can't be reached ({error.strerror})", param="--rdzv") from error


def tcp(host: str, port: int | str) -> str:
    """A zmq address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen_at(socket: zmq.Socket[Any], address: str, patience: float) -> None:
    """Binds ``socket`` to ``address``, the one of ``--rdzv``.

    A port that is taken is waited for ``patience`` seconds: a process that was killed holds its ports until
    it has ended, and may be followed before. Raises ConfigError.
    """
    until = time.monotonic() + patience
    waits = False
    while (number := _bind(socket, address)) != 0:
        if number != errno.EADDRINUSE or time.monotonic() >= until:
            hint = f" for {patience:g} s" if waits else ""
            hint += ": give another port" if number == errno.EADDRINUSE else ""
            why = f"--rdzv: can't listen at {address} ({zmq.strerror(number)}){hint}"
            raise ConfigError(why, param="--rdzv")
        if not waits:
            log.warning("%s is taken: waiting for it, for %g s", address, patience)
        waits = True
        time.sleep(_AGAIN)


def _bind(socket: zmq.Socket[Any], address: str) -> int:
    """0, or the number of the error."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno is None:
            raise
        return error.errno
    return 0
