"""Threads that compile: their stacks, which libraries need to recurse over rules, and their priority."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

STACK_BYTES: Final = 256 << 20
"""An overflow would end the process. Only the used part takes memory."""
LONG_S = 0.05
"""Seconds after which a compile is a long one."""
NICENESS = 10
"""Of threads with long compiles: steps, and the compiles of others, go first where cores are short."""
_lock = threading.Lock()


def with_stack(thread: threading.Thread) -> None:
    """Start ``thread`` with a stack of ``STACK_BYTES``; the size is a setting of the process, put back."""
    with _lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


def step_back(thread: threading.Thread) -> None:
    """Lower the priority of ``thread``, for the rest of its life: Linux counts niceness by thread."""
    if thread.native_id is not None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, NICENESS)
