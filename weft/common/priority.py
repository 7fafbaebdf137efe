"""Lower the priority of threads with long work, so that engine steps and short work run first."""

from __future__ import annotations

import contextlib
import os
import threading

LONG_S = 0.05
"""Seconds after which work counts as long."""
NICENESS = 10
"""Niceness of threads with long work, in a process of normal priority."""


def step_back(thread: threading.Thread, niceness: int = NICENESS) -> None:
    """Lower the priority of ``thread`` permanently. On Linux niceness is per thread."""
    if thread.native_id is not None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, niceness)
