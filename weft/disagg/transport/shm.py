"""Ranks on one host: the receiver maps the sender's caches, read-only, and copies from the mapped memory.

The sender copies nothing, and only sends the spans of ready bytes. The sender's regions are
``SharedMemory``. Their descriptors go over a Unix socket at connection. Only processes of the same user, or
of root, may connect.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

import numpy as np
import torch

from weft.common.errors import ConfigError, EngineDead
from weft.disagg.transport import wire as f
from weft.disagg.transport.peer_connection import MOST_FDS, Got
from weft.disagg.transport.peer_links import ByteSource, PeerLink, check_inside
from weft.disagg.transport.shared_memory import SharedMemory, map_read_only
from weft.disagg.transport.sockets import SocketTransport
from weft.disagg.transport.staging_memory import DirectMemory


class ShmTransport(SocketTransport):
    """Shared memory transport. Listens on a Unix socket in ``folder``. Only this user may enter
    ``folder``."""

    name = "shm"
    write_bytes = 16 << 20
    window_bytes = 128 << 20
    slot_bytes = 4 << 20
    takes_fds = True

    def __init__(self, folder: str, rank: int, incarnation: int) -> None:
        """Raises ConfigError if the socket cannot be made."""
        self._path = os.path.join(folder, f"t{rank}-{incarnation & 0xFFFFFFFF:x}")
        super().__init__(rank, incarnation)

    def share(self, regions: Sequence[SharedMemory]) -> None:
        """Register regions that peers may map, in place of ``register``. Raises EngineDead for too many
        regions."""
        if len(regions) > MOST_FDS:
            raise EngineDead(f"{len(regions)} regions of caches, of at most {MOST_FDS} that can be shared")
        self._use(DirectMemory([region.tensor for region in regions], list(regions)))

    def close(self) -> None:
        super().close()
        if os.path.exists(self._path):
            os.unlink(self._path)

    def _listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket, private to this user, and its path. Raises ConfigError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(self._path)
            os.chmod(self._path, 0o600)
            sock.listen(128)
        except OSError as error:
            sock.close()
            raise ConfigError(f"no socket for transfers can be made ({error.strerror})") from error
        return sock, self._path

    def _socket(self, address: str) -> tuple[socket.socket, object]:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address

    def _admit(self, sock: socket.socket) -> None:
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.geteuid()):
            raise f.BadFrame("a process of another user")

    def _hello(self, link: PeerLink, wanted: int) -> None:
        shared = self._memory.shared
        sizes = tuple(region.nbytes for region in shared)
        hello = f.PeerHello(f.VERSION, self.name, self.incarnation, wanted, self.rank, regions=sizes)
        link.connection.send(hello, fds=[region.fd for region in shared])

    def _met(self, link: PeerLink, hello: f.PeerHello) -> None:
        """Finish the handshake. A receiver first maps the writer's regions read-only and closes the
        descriptors. Raises BadFrame for a wrong number of descriptors, EngineDead for memory without
        seals."""
        if not link.writer:
            # The mappings stay valid without the descriptors, so close all descriptors, on errors too.
            fds, link.connection.fds = link.connection.fds, []
            try:
                if len(fds) != len(hello.regions):
                    raise f.BadFrame("the number of descriptors differs from the number of regions")
                pairs = zip(fds, hello.regions, strict=True)
                link.regions = tuple(map_read_only(fd, size) for fd, size in pairs)
            finally:
                for fd in fds:
                    os.close(fd)
        super()._met(link, hello)

    def _sources(
        self, link: PeerLink, parts: Sequence[tuple[f.SpansFrame, np.ndarray]], got: Got
    ) -> ByteSource:
        """Return the writer's mapped regions as the source of a write. Raises BadFrame for an unknown region
        or a span outside the region."""
        memory = list[torch.Tensor]()
        for part, spans in parts:
            if part.source >= len(link.regions):
                raise f.BadFrame("a write names a region that its sender has not passed")
            memory.append(link.regions[part.source])
            check_inside(spans[:, 0], spans[:, 2], memory[-1].numel())
        return ByteSource(tuple(memory), tuple((part.target, spans) for part, spans in parts), np.empty(0), 0)

    def _held_bytes(self, frame: f.WriteFrame, got: Got) -> int:
        return 1024 + sum(len(part.spans) for part in frame.parts)
