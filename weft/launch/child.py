"""How a child process of Weft starts: what it inherits, and that it never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from typing import TypeVar

import msgspec

from weft.common import env, signals

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5

Setup = TypeVar("Setup", bound=msgspec.Struct)


def forbid_core_dumps() -> None:
    """No core dumps (they hold users' text) of this process and its children, unless WEFT_CORE_DUMPS=1."""
    if env.get("WEFT_CORE_DUMPS") != "1":
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def die_with_parent(parent: int) -> None:
    """Kills this process when process ``parent`` ends, however it ends.

    On Linux the kernel does it; a thread that polls covers other systems and a parent that ended before the
    kernel was asked. Must be called from the main thread, with ``parent`` the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


def begin(parent: int) -> None:
    """What every process does first that process ``parent`` starts for a server. From the main thread."""
    die_with_parent(parent)
    ignore_signals()
    forbid_core_dumps()


def ignore_signals() -> None:
    """Leaves the signals that ask to stop to the parent, which drains; see ``weft.common.signals``."""
    signals.ignore()
    signal.signal(signals.RESTART, signal.SIG_IGN)


def read_setup(kind: type[Setup]) -> Setup:
    """What the parent writes to this process's standard input, as msgpack, before anything else.

    A parent that was told to stop may end before it has written all of it: this process then ends with
    status 1 and no word.
    """
    data = sys.stdin.buffer.read()
    sys.stdin.close()
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        if str(error) != "Input data was truncated":
            raise
        sys.exit(1)
