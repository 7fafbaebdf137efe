"""Memory that a process shares by descriptor: no name, no file, no limit of /dev/shm.

The owner maps it for reading and writing, then seals it: its size never changes, and nobody can map it for
writing any more, whoever has the descriptor. So a receiver reads what a sender shows, and can never change
it, nor be ended by memory that is cut off behind its back.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from weft.common.errors import EngineDead
from weft.common.shared_bytes import SEALED, is_sealed, new_memory


class SharedMemory:
    """Zeros, which take no memory until they are written. ``tensor`` is uint8 [bytes]."""

    def __init__(self, nbytes: int, name: str = "weft-cache") -> None:
        """Raises OSError."""
        self.nbytes = nbytes
        self.fd = new_memory(max(nbytes, 1), name)
        try:
            pages = mmap.mmap(self.fd, max(nbytes, 1), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALED | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(self.fd)
            raise
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]

    def close(self) -> None:
        """Gives up the descriptor; the tensor lives on."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_read_only(fd: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of another process's ``SharedMemory``; ``fd`` is not needed any more afterwards.

    Raises EngineDead for memory that is not sealed, or not of this size.
    """
    size = max(nbytes, 1)
    try:
        sealed = is_sealed(fd, size)
    except OSError as error:
        raise EngineDead("a peer shows something that is no shared memory") from error
    if not sealed:
        raise EngineDead("a peer shows memory whose size or content it could change behind our back")
    pages = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    import warnings

    with warnings.catch_warnings():  # torch warns of memory that it must not write; nothing writes it
        warnings.simplefilter("ignore")
        return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
