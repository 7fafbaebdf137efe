"""Files with new weights in shared memory: how long they stay.

    write_shared ──► /dev/shm/weft-N-TOKEN.safetensors ──► hold: one lock of each process that needs it
                                                       └──► keep: the last process that needs it deletes it

A process that is killed leaves files without a lock. The next process that receives or writes weights deletes
such files when they are old.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
import weakref
from collections.abc import Collection, Iterable
from pathlib import Path

from weft.store.new_weights import SHARED

STALE_S = 120.0
"""Age from which a complete file without a lock is deleted, in seconds. A file that was just written has no
lock for a moment."""
LOST_S = 10.0
"""The same of an incomplete file, on which the writer has a lock."""
_IS_OURS = re.compile(r"\.?weft-\d+-[0-9a-f]{16}\.safetensors(\.\d+)?")


def new_token() -> str:
    """Return 16 random hex digits for ``shared_name``."""
    return secrets.token_hex(8)


def shared_name(number: int, token: str) -> str:
    """Return the name of a file that Weft deletes. Names of other forms are the client's."""
    return f"weft-{number}-{token}.safetensors"


def token_of(file: str) -> str:
    """Return the token in the path of a file with a ``shared_name``."""
    return Path(file).stem.rpartition("-")[2]


class SharedFiles:
    """The files in shared memory that this process needs. Used from one thread."""

    def __init__(self) -> None:
        self._locks: dict[str, int] = {}
        """Open descriptor with a shared lock, by path."""
        weakref.finalize(self, _release, self._locks, ())  # also at the end of the process

    def hold(self, files: Iterable[str]) -> None:
        """Keep ``files`` until ``keep`` without them. Files of a client, or of other hosts, are ignored."""
        for path in files:
            if path in self._locks or not _IS_OURS.fullmatch(os.path.basename(path)):
                continue
            try:
                lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:  # of another host, or of another user
                continue
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                self._locks[path] = lock
            else:  # another process has deleted the file meanwhile
                os.close(lock)

    def keep(self, files: Collection[str]) -> None:
        """Release all files except ``files``. The last process that needs a file deletes the file."""
        _release(self._locks, files)

    def leave(self) -> None:
        """Release all files, and delete none: another process will need the files."""
        while self._locks:
            os.close(self._locks.popitem()[1])


def _release(locks: dict[str, int], kept: Collection[str]) -> None:
    for path in locks.keys() - set(kept):
        lock = locks.pop(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).unlink(missing_ok=True)
        except OSError:  # another process needs the file
            pass
        finally:
            os.close(lock)


def delete_stale(folder: Path = SHARED) -> None:
    """Delete files of processes that were killed: files without a lock, older than ``STALE_S`` or ``LOST_S``.

    A lock, unlike a process id, has a meaning also between containers that share /dev/shm.
    """
    for path in [*folder.glob("weft-*.safetensors"), *folder.glob(".weft-*.safetensors.*")]:
        try:
            limit = LOST_S if path.name.startswith(".") else STALE_S
            if time.time() - path.stat().st_mtime < limit or not _IS_OURS.fullmatch(path.name):
                continue
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            finally:
                os.close(lock)
        except OSError:  # the file is in use, gone, or of another user
            continue
