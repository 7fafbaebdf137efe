"""Bytes shared by name between processes of one host: memory without a file (memfd), opened through the
``/proc`` entry of the owning process.

    owner        creates the memory with a fixed size
    writer       the owner, or the first process that receives the name, writes the bytes once
    owner        seals the memory: no process can write any more
    readers      open the memory by name, map the memory and close the descriptor

A mapping stays valid after the end of any process, and no process can shrink the memory of a reader.
Descriptor numbers are reused, so a stale name could name other memory. Therefore the memory ends with a
random mark, which must equal the mark in the name.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import secrets
from collections.abc import Iterator

import msgspec

from weft.common.errors import PixelsLost

UNREACHABLE = "pixels_unreachable"
"""Error code for memory that exists but that this process cannot open: the bytes must be sent instead."""
_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; missing in Python
FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEALED = FIXED | _SEAL_FUTURE_WRITE
_KIND = "weft-bytes"
_MARK = 16
_GONE = "the shared memory of an image is gone: its owner has ended or has closed the memory"


class SharedName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a ``SharedBytes``."""

    pid: int
    fd: int
    """Number of the descriptor in the owner's process."""
    size: int
    mark: bytes
    """16 random bytes, unique to the memory."""


class SharedBytes:
    """Shared memory on the owner's side. ``close`` releases the descriptor, after which the name is stale."""

    def __init__(self, size: int) -> None:
        """Allocate ``size`` zero bytes of shared memory and set ``name``. Raises OSError."""
        self._fd = new_memory(size + _MARK, _KIND)
        mark = secrets.token_bytes(_MARK)
        try:
            os.pwrite(self._fd, mark, size)
        except BaseException:
            os.close(self._fd)
            raise
        self.name = SharedName(pid=os.getpid(), fd=self._fd, size=size, mark=mark)

    def seal(self) -> memoryview:
        """Seal the memory and return a read-only view. The view stays valid after ``close``. Raises
        OSError.
        """
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALED | fcntl.F_SEAL_SEAL)
        return _mapped(self._fd, self.name.size)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def new_memory(nbytes: int, name: str) -> int:
    """Return a descriptor of ``nbytes`` zero bytes of fixed size. Pages take no memory until written. Raises
    OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int, nbytes: int, seals: int = SEALED) -> bool:
    """Return True if the descriptor is memory of size ``nbytes`` with ``seals``. Raises OSError for other
    descriptors.
    """
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals and os.fstat(fd).st_size == nbytes


def open_shared(name: SharedName) -> tuple[int, memoryview]:
    """Return (a local descriptor, a read-only view of the bytes). The caller closes the descriptor.

    Raises PixelsLost.
    """
    with _opened(name, os.O_RDONLY, SEALED) as fd:
        view = _mapped(fd, name.size)
        return os.dup(fd), view


def write_shared(name: SharedName, data: bytes) -> None:
    """Write all bytes of memory not yet sealed by the owner.

    Raises PixelsLost if the memory is gone, sealed or of another size.
    """
    with _opened(name, os.O_RDWR, FIXED) as fd:
        if len(data) != name.size:
            raise PixelsLost("the pixels of an image have another size than their shared memory")
        view = memoryview(data)
        while len(view):
            view = view[os.pwrite(fd, view, name.size - len(view)) :]


def reaches(name: SharedName) -> bool:
    """Return True if this process can open the memory, and the owner runs as the same user. Then the owner
    can also open memory of this process.
    """
    try:
        with _opened(name, os.O_RDONLY, SEALED) as fd:
            return os.fstat(fd).st_uid == os.geteuid()
    except PixelsLost:
        return False


def most_descriptors() -> int:
    """Return the maximum descriptors for shared memory: a quarter of the process's descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else soft // 4


@contextlib.contextmanager
def _opened(name: SharedName, flags: int, seals: int) -> Iterator[int]:
    """Yield a descriptor of the named memory, closed afterwards.

    Raises PixelsLost unless the memory is still the same and has ``seals``.
    """
    path = f"/proc/{name.pid}/fd/{name.fd}"
    try:
        # Check the link first: a reused number may belong to a pipe or device, where opening has effects.
        if not os.readlink(path).startswith(f"/memfd:{_KIND}"):
            raise PixelsLost(_GONE)
        fd = os.open(path, flags | os.O_CLOEXEC)
        try:
            nbytes = name.size + _MARK
            if not is_sealed(fd, nbytes, seals) or os.pread(fd, _MARK, name.size) != name.mark:
                raise PixelsLost(_GONE)
            yield fd
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        raise PixelsLost(_GONE) from None
    except OSError as error:
        raise PixelsLost(
            f"the shared memory of an image cannot be opened ({error.strerror})", code=UNREACHABLE
        ) from None


def _mapped(fd: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(fd, size + _MARK, mmap.MAP_SHARED, mmap.PROT_READ))[:size]
