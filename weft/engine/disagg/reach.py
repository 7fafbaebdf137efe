"""Finds out if this process shares memory with a process that listens at a Unix socket."""

from __future__ import annotations

import errno
import os
import socket
import struct

from weft.engine.disagg.transfer_channel import MOST_PATH


def reaches(path: str) -> bool:
    """Return True if a live process of this user, or of root, listens at the Unix socket ``path``.

    A connection to a socket in the file system proves the same kernel, the same folder and a live listener:
    memory passed over the socket can be mapped. A path that exists on another host or in another container
    has no listener here. Neither sends a byte nor waits.
    """
    if not path.startswith("/") or len(os.fsencode(path)) > MOST_PATH or "\0" in path:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except OSError as error:
            # A listener with a full queue: the listener is there, and its owner could enter the folder.
            return error.errno == errno.EAGAIN
        _, user, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user in (0, os.geteuid())
