"""Memory shared by file descriptor: no name, no file, no limit of /dev/shm.

The owner maps the memory for reading and writing, then seals the memory. After the seal the size never
changes, and no process can map the memory for writing, even with the descriptor. So a receiver can read a
sender's memory, but never change it, and the sender cannot crash the receiver by shrinking the memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from weft.common.errors import EngineDead
from weft.common.shared_bytes import SEALED, is_sealed, new_memory


class SharedMemory:
    """Zeroed shared memory. Pages take no memory before the first write. ``tensor`` is uint8 [bytes]."""

    def __init__(self, nbytes: int, name: str = "weft-cache") -> None:
        """Raises OSError if the system has no memory or descriptor left."""
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
        """Close the descriptor. The tensor stays valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_read_only(fd: int, nbytes: int) -> torch.Tensor:
    """Return uint8 [nbytes]: another process's ``SharedMemory``, mapped read-only. The caller may close
    ``fd`` afterwards.

    Raises EngineDead for memory without seals, or of another size.
    """
    size = max(nbytes, 1)
    try:
        sealed = is_sealed(fd, size)
    except OSError as error:
        raise EngineDead("a peer passed a descriptor that is not shared memory") from error
    if not sealed:
        raise EngineDead("a peer passed shared memory that the peer can still change")
    pages = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    import warnings

    with warnings.catch_warnings():  # torch warns about read-only memory; no code writes to the tensor
        warnings.simplefilter("ignore")
        return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
