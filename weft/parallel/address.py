"""Addresses of this host, as seen from other hosts of a group."""

from __future__ import annotations

import errno
import signal
import socket
import time
from typing import Any

import zmq

from weft.common import signals
from weft.common.errors import ConfigError
from weft.common.log import get_logger

log = get_logger(__name__)

_AGAIN = 0.1


def own_address(host: str, port: int) -> str:
    """Return the numeric address of this host on the route to ``host``, which may be this host.

    Nothing is sent, but a name is resolved, which may block. Raise ConfigError if there is no route.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--join: {host} cannot be reached ({error.strerror})", param="--join") from error


def tcp(host: str, port: int | str) -> str:
    """Return the zmq address of ``host`` and ``port``, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen_at(socket: zmq.Socket[Any], address: str, patience: float) -> None:
    """Bind ``socket`` to ``address``, where other hosts of a group join. Raise ConfigError.

    Block up to ``patience`` seconds, with a warning, for a port in use: a killed process keeps its ports
    until its end, and its successor may start earlier.
    """
    until = time.monotonic() + patience
    waits = False
    while (number := _bind(socket, address)) != 0:
        if number != errno.EADDRINUSE or time.monotonic() >= until:
            hint = f" for {patience:g} s" if waits else ""
            hint += ": choose another port" if number == errno.EADDRINUSE else ""
            why = f"--join-port: cannot listen at {address} ({zmq.strerror(number)}){hint}"
            raise ConfigError(why, param="--join-port")
        if not waits:
            log.warning("%s is in use: waiting up to %g s", address, patience)
        waits = True
        _sleep(_AGAIN)


def _sleep(seconds: float) -> None:
    """Sleep. Stop signals that the caller has blocked end this process meanwhile, as before the block."""
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPS)
    try:
        time.sleep(seconds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _bind(socket: zmq.Socket[Any], address: str) -> int:
    """Bind the socket. Return 0, or the errno of the failure. Raise zmq.ZMQError only without an errno."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno is None:
            raise
        return error.errno
    return 0
