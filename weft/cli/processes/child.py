"""Start of Weft's child processes: inherited settings, and the end of a child with the parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import msgspec

from weft.common import env, signals

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5

Setup = TypeVar("Setup", bound=msgspec.Struct)


def forbid_core_dumps() -> None:
    """Disable core dumps of this process and all children, unless WEFT_CORE_DUMPS=1.

    Core dumps would contain users' text.
    """
    if env.get("WEFT_CORE_DUMPS") != "1":
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def die_with_parent(parent: int) -> None:
    """Kill this process when the parent process ends, for any reason.

    On Linux the kernel kills the process. A polling thread covers other systems, and a parent that ended
    before the request to the kernel. Call from the main thread, with the process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    """End this process once the parent is another process."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


def begin(parent: int) -> None:
    """Prepare a process started by process ``parent`` for a server. Call first, from the main thread."""
    die_with_parent(parent)
    ignore_signals()
    forbid_core_dumps()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import torch and other modules without garbage collections, which would visit torch's objects several
    times and free nothing. Later collections leave out all present objects."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def end_after(run: Callable[[list[str]], int]) -> NoReturn:
    """Call ``run`` with the arguments of the command, and end this process with the returned status.

    Functions of ``atexit`` are called, and the kernel frees the rest. The interpreter would first visit all
    objects of torch, which takes seconds on a busy host, and would wait for threads without a deadline. The
    owner of the process, and the memory of a GPU, would wait meanwhile.
    """
    try:
        status = run(sys.argv[1:])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # AttributeError: None, for a process that was started with a closed descriptor.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)


def ignore_signals() -> None:
    """Ignore stop signals: the parent handles stop signals and drains; see ``weft.common.signals``."""
    signals.ignore()
    signal.signal(signals.RESTART, signal.SIG_IGN)


def read_setup(kind: type[Setup]) -> Setup:
    """Return the parent's message on standard input, decoded from msgpack. Close standard input.

    A stopped parent may end in the middle of the message. The process then exits with status 1, without an
    error message.
    """
    data = sys.stdin.buffer.read()
    sys.stdin.close()
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        if str(error) != "Input data was truncated":
            raise
        sys.exit(1)
