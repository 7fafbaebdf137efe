"""Bytes that another process of this host reads by name: memory without a file (memfd), opened by way of
``/proc`` of the process that has its descriptor.

    owner        makes it, of a fixed size, which nobody can change any more
    writer       the owner, or whom it gives the name first, writes it, once
    owner        seals it: from then on nobody can write it
    readers      open it by its name, map it and need no descriptor any more

What is mapped stays as it is, whoever ends: memory cannot be cut off behind a reader's back. A name that is
no longer right leads nowhere: a descriptor's number may be that of something else by now, so the memory's
last bytes are a random mark, which the name repeats.
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
"""Code of what this process cannot open, though it may be there: bytes have to be sent."""
_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python has no name for it
FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEALED = FIXED | _SEAL_FUTURE_WRITE
_KIND = "weft-bytes"
_MARK = 16
_GONE = "the memory that had an image is gone: its process has ended, or closed it"


class SharedName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where ``SharedBytes`` are found."""

    pid: int
    fd: int
    """The descriptor's number in that process."""
    size: int
    mark: bytes
    """16 bytes, which no other memory has."""


class SharedBytes:
    """Shared memory, as its owner has it. ``close`` gives up the descriptor: then the name leads nowhere."""

    def __init__(self, size: int) -> None:
        """Zeros. Raises OSError."""
        self._fd = new_memory(size + _MARK, _KIND)
        mark = secrets.token_bytes(_MARK)
        try:
            os.pwrite(self._fd, mark, size)
        except BaseException:
            os.close(self._fd)
            raise
        self.name = SharedName(pid=os.getpid(), fd=self._fd, size=size, mark=mark)

    def seal(self) -> memoryview:
        """What was written, to be read only. It lasts as long as somebody has it. Raises OSError."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALED | fcntl.F_SEAL_SEAL)
        return _mapped(self._fd, self.name.size)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def new_memory(nbytes: int, name: str) -> int:
    """A descriptor of zeros, which take no memory until they are written, of a fixed size. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int, nbytes: int, seals: int = SEALED) -> bool:
    """Whether it is memory of this size that has these seals. Raises OSError where it is none at all."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals and os.fstat(fd).st_size == nbytes


def open_shared(name: SharedName) -> tuple[int, memoryview]:
    """A descriptor of this process, and the bytes, to be read only. Raises PixelsLost."""
    with _opened(name, os.O_RDONLY, SEALED) as fd:
        view = _mapped(fd, name.size)
        return os.dup(fd), view


def write_shared(name: SharedName, data: bytes) -> None:
    """Writes all of what its owner has not sealed yet. Raises PixelsLost."""
    with _opened(name, os.O_RDWR, FIXED) as fd:
        if len(data) != name.size:
            raise PixelsLost("the pixels of an image are not as many as was said")
        view = memoryview(data)
        while len(view):
            view = view[os.pwrite(fd, view, name.size - len(view)) :]


def reaches(name: SharedName) -> bool:
    """Whether this process can open what another one with the same rights shows, and so the other way
    round.
    """
    try:
        with _opened(name, os.O_RDONLY, SEALED) as fd:
            return os.fstat(fd).st_uid == os.geteuid()
    except PixelsLost:
        return False


def most_descriptors() -> int:
    """How many a process may have open for this: a quarter of its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else soft // 4


@contextlib.contextmanager
def _opened(name: SharedName, flags: int, seals: int) -> Iterator[int]:
    path = f"/proc/{name.pid}/fd/{name.fd}"
    try:
        # What else has this number by now may be a pipe or a device, which must not even be opened.
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
            f"the memory that has an image cannot be opened ({error.strerror})", code=UNREACHABLE
        ) from None


def _mapped(fd: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(fd, size + _MARK, mmap.MAP_SHARED, mmap.PROT_READ))[:size]
