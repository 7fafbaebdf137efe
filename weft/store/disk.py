"""System calls of the disk tier, and checks of folders."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

import numpy as np

from weft.common.errors import ConfigError
from weft.store.records import PAGE

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "afs", "beegfs", "gpfs", "fuse.sshfs", "9p")
"""Beginnings of the names of file systems that other hosts may change, where locks and O_DIRECT differ."""
FLAG = "--kv-disk-dir"
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


class Disk:
    """The system calls of the tier. All raise OSError. Tests replace single calls."""

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        """True: records move past the page cache (O_DIRECT)."""

    def create(self, path: Path) -> int:
        """Create a file for writing and reading of this user alone. Return the descriptor."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | self._direct, 0o600)

    def open(self, path: Path, *, write: bool = False, direct: bool = False) -> int:
        """Open a file and return the descriptor."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (self._direct if direct else 0))

    def read(self, fd: int, memory: np.ndarray, offset: int) -> int:
        """Read at ``offset`` into ``memory``, uint8 [n]. Return the number of bytes, less at the end."""
        done = 0
        while done < len(memory):
            count = os.preadv(fd, [memory[done:].data], offset + done)
            done += count
            # A read past the last page of a file ends unaligned: there is no more.
            if not count or done % PAGE:
                break
        return done

    def write(self, fd: int, memory: np.ndarray, offset: int) -> None:
        """Write ``memory``, uint8 [n], at ``offset``."""
        done = 0
        while done < len(memory):
            done += os.pwritev(fd, [memory[done:].data], offset + done)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give a new file ``nbytes`` bytes, with space on disk where the file system can."""
        try:
            _fallocate(fd, 0, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(fd, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Replace bytes by zeros, and free the space where the file system can."""
        try:
            _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            zeros = np.frombuffer(mmap.mmap(-1, min(nbytes, 1 << 20)), np.uint8)
            for at in range(0, nbytes, len(zeros)):
                self.write(fd, zeros[: nbytes - at], offset + at)

    def sync(self, fd: int) -> None:
        """Wait until the bytes of a file are on the disk."""
        os.fdatasync(fd)

    @property
    def _direct(self) -> int:
        return os.O_DIRECT if self.direct else 0


def lock(fd: int) -> bool:
    """Lock a file for this descriptor. Return False if another process or descriptor has the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def private_folder(folder: Path) -> None:
    """Create a folder that only the current user can enter. Raises ConfigError for a link and for a folder of
    another user, and OSError."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder} is no folder: name a folder with {FLAG}", param=FLAG)
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{folder} is another user's: name a folder of your own with {FLAG}", param=FLAG)
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)


def safe_root(folder: Path) -> None:
    """Create the root folder, or check an existing folder, whose permissions stay.

    Raises ConfigError if other users could replace the folders inside, and OSError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        found = folder.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{folder} is no folder: name a folder with {FLAG}", param=FLAG) from None
        # A sticky folder, such as /tmp, lets only owners replace entries.
        others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or others:
            raise ConfigError(
                f"other users can change {folder}: name a folder of your own with {FLAG}", param=FLAG
            ) from None


def network_file_system(folder: Path) -> str:
    """Return the name of the folder's file system if the file system is on a network; else ""."""
    path = folder.resolve()
    best, found = -1, ""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        # The last mount of the longest path counts.
        if (path == mount or mount in path.parents) and len(mount.parts) >= best:
            best, found = len(mount.parts), after.split()[0]
    return found if found.startswith(_NETWORK) else ""


def can_direct(folder: Path) -> bool:
    """Return True if files of ``folder`` can be read and written past the page cache. Raises OSError."""
    path = folder / f"probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            path.unlink(missing_ok=True)
            return False
        raise
    try:
        memory = mmap.mmap(-1, PAGE)
        os.pwritev(fd, [memory], 0)
        return os.preadv(fd, [memory], 0) == PAGE
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, mode, offset, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
