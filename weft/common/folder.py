"""Private folders for sockets and files of one user, and the removal of abandoned private folders.

The owner of a folder locks a file inside. The kernel releases the lock at the end of the process. Whoever can
take the lock may therefore remove the folder. A folder without the lock file is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO, Literal, TextIO, overload

from weft.common import env

#: Maximum bytes of a folder path. A Unix socket path has at most 107 bytes, and the socket needs a name.
_LONGEST = 80
_PREFIX = "weft-"
_NAME = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")
"""Names made by mkdtemp from the prefix."""
_LOCK = "owner.lock"
NO_HOME = Path(os.devnull, "no-home-folder")
"""Path that cannot exist: a cache folder below cannot be written, and error messages show the path."""
_locks: dict[Path, int] = {}
"""Folder of this process -> descriptor of its lock file (close-on-exec)."""


def home_folder() -> Path:
    """Return the user's home folder; ``NO_HOME`` for a user without one."""
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and no entry for the user, as in containers with a random user
        return NO_HOME


def expanded(name: str | Path) -> Path:
    """Return the path ``name`` with the home folder in place of a leading ~.

    The name of an unknown user stays: such a path does not exist.
    """
    return Path(os.path.expanduser(name))


def cache_folder(name: str) -> Path:
    """Return the path of folder ``name`` in the user's cache of Weft. The folder may not exist yet."""
    root = env.get("XDG_CACHE_HOME") or str(home_folder() / ".cache")
    return Path(root) / "weft" / name


@overload
def open_private(path: Path, mode: Literal["w"]) -> TextIO: ...


@overload
def open_private(path: Path, mode: Literal["ab"]) -> BinaryIO: ...


def open_private(path: Path, mode: Literal["w", "ab"]) -> TextIO | BinaryIO:
    """Open a file that only the current user may access, like ``open``; text is UTF-8. Raises OSError.

    Mode "ab" keeps existing content. Permissions of other users on an existing file are removed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if mode == "w" else os.O_APPEND)
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # another user's file, or a file system without permissions
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "ab") if mode == "ab" else os.fdopen(descriptor, "w", encoding="utf-8")


def private_folder() -> Path:
    """Create a folder that only the current user can enter and return the path, short enough for a socket
    inside.

    The folder stays locked while this process lives. The caller removes the folder. Abandoned folders of the
    same user in the same parent folder are removed here. Raises OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(os.fsencode(folder)) > _LONGEST:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    with contextlib.suppress(OSError):  # a file system without locks: no later process can remove the folder
        _lock(folder)
    _sweep(folder.parent)
    return folder


def _lock(folder: Path) -> None:
    """Lock the folder for the life of this process. Raises OSError on a file system without locks."""
    # Release the locks of folders that were removed.
    for path in [path for path in _locks if not path.exists()]:
        os.close(_locks.pop(path))
    made = folder / f".{_LOCK}"
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(folder / _LOCK)  # renamed under the lock: the lock file never exists unlocked
    except OSError:
        os.close(descriptor)
        raise
    _locks[folder] = descriptor


def _sweep(parent: Path) -> None:
    """Remove the abandoned folders in ``parent``. Errors are ignored."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_dead(parent / entry.name)


def _remove_if_dead(folder: Path) -> None:
    """Remove the folder if the owner is dead. Return without effect for a folder of another user or mode.

    Raises OSError if the lock is held or missing.
    """
    # Never follow links: another user may replace entries of a shared parent folder.
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(within)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
            return
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=within)
        try:
            if stat.S_ISREG(os.fstat(lock).st_mode):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)  # follows no links
        finally:
            os.close(lock)
    finally:
        os.close(within)
