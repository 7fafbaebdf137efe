"""Compile the C++ operations beside a server that already serves.

    built(groups)?  yes ─► nothing to do
         │ no
         ▼
    engines start on torch's operations ─► `weft build-ops` in a process of its own ─0─► ready()
                                                                                     └─► the log says why not

An engine keeps its operations for life, because bits of torch's and the C++ operations differ. So ``ready``
asks the owner of the engines for a switch at an idle moment (``weft.cluster.rolling``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from weft.common import env
from weft.common.log import get_logger
from weft.ops.cpu import build

_NICENESS = 10
"""The compilers get the cores that serving leaves."""
_END_S = 5.0
"""Seconds that the build gets to end its compilers when the server ends."""

log = get_logger(__name__)


def built() -> bool:
    """Return True if an engine that starts now finds the C++ operations, or must not use them."""
    if env.get("WEFT_DISABLE_CPU_OPS") == "1":
        return True
    try:
        return build.find() is not None
    except (OSError, RuntimeError):  # no home folder, or a folder that can't be read: `cpu.load` says so
        return True


class OperationsBuild:
    """One run of ``weft build-ops`` beside a server. ``close`` ends it, and may be called at any time."""

    def __init__(self, ready: Callable[[], None]) -> None:
        """Starts the build. ``ready`` is called once, from another thread, if the build succeeds."""
        self._ready = ready
        self._closed = False
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft", "build-ops"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a Ctrl-C of the terminal is the server's, which may drain for long
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
        threading.Thread(target=self._follow, name="weft-build-ops", daemon=True).start()

    def close(self) -> None:
        """Ends the build, if it still runs. Objects that are compiled stay for the next build."""
        self._closed = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _follow(self) -> None:
        """Logs the build's lines, and reports how it ended."""
        assert self._process.stdout is not None
        last = ""
        for line in self._process.stdout:
            if line.strip():
                last = line.strip()
                log.debug("build-ops: %s", last)
        status = self._process.wait()
        if self._closed:
            return
        if status:
            log.warning("the C++ operations are not compiled, and torch's stay in use: %s", last)
            return
        log.info(
            "the C++ operations are compiled (%.0f s); engines change to them when no request runs",
            time.monotonic() - self._began,
        )
        self._ready()
