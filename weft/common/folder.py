"""Folders for sockets and files that only this user may reach."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

#: A Unix socket's path has at most 107 bytes; the folder must leave room for a name in it.
_LONGEST = 90


def private_folder() -> Path:
    """A new folder that only this user can enter, with a name short enough for a socket inside it."""
    folder = Path(tempfile.mkdtemp(prefix="weft-"))
    if len(os.fsencode(folder)) > _LONGEST:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="weft-", dir="/tmp"))
    return folder
