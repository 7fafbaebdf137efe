"""Compilation of the C++ operations during the run of a server.

    built(groups)?  yes ─► nothing to do
         │ no
         ▼
    engines start on torch's operations ─► `weft build-ops` in a process of its own ─0─► ready()
                                                                                     └─► the log says why not

An engine keeps its operations for life, because the bits of torch's and of the C++ operations differ. So
``ready`` requests a switch from the owner of the engines at an idle moment
(``weft.control.processes.rolling``).
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
"""Low priority: the compilers get the cores that serving leaves."""
_SAID_S = 15.0
"""Seconds between two lines about the progress of the build."""
_END_S = 5.0
"""Seconds for the build to end its compilers when the server ends."""

log = get_logger(__name__)


def built() -> bool:
    """Return True if a new engine finds the C++ operations or must not use them.

    Also True if the cache folder cannot be read: ``cpu.load`` logs the reason. Raises ConfigError for a bad
    WEFT_CPU_LEVEL.
    """
    if env.get("WEFT_DISABLE_CPU_OPS") == "1":
        return True
    try:
        return build.find() is not None
    except (OSError, RuntimeError):  # no home folder, or an unreadable folder: `cpu.load` logs the reason
        return True


class OperationsBuild:
    """One run of ``weft build-ops`` during the run of a server. ``close`` may be called at any time."""

    def __init__(self, ready: Callable[[], None]) -> None:
        """Start the build at low priority.

        ``ready`` is called once, from another thread, if the build succeeds before ``close``. The result and
        failures are logged.
        """
        self._ready = ready
        self._closed = False
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft", "build-ops"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for the server, which may drain for long
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
        threading.Thread(target=self._follow, name="weft-build-ops", daemon=True).start()

    def close(self) -> None:
        """End the build if it runs, and wait up to ``_END_S``; then kill.

        ``ready`` is not called any more. Compiled objects stay for the next build.
        """
        self._closed = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _follow(self) -> None:
        """Log the first line of the build, its progress now and then, and its result; call ``ready`` after
        success.

        After ``close`` neither happens. Body of a thread.
        """
        assert self._process.stdout is not None
        last, said = "", float("-inf")
        for line in self._process.stdout:
            if not line.strip():
                continue
            last = line.strip()
            if time.monotonic() - said >= _SAID_S and not self._closed:
                said = time.monotonic()
                log.info("C++ operations: %s", last)
            else:
                log.debug("C++ operations: %s", last)
        status = self._process.wait()
        if self._closed:
            return
        if status:
            log.warning("compiling the C++ operations failed, and torch's operations stay in use: %s", last)
            return
        log.info(
            "the C++ operations are compiled (%.0f s); the switch waits until no request runs",
            time.monotonic() - self._began,
        )
        self._ready()
