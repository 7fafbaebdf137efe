"""Addresses of this host, as other hosts of a group see it."""

from __future__ import annotations

import socket

from weft.common.errors import ConfigError


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
