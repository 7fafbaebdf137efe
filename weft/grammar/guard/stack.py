"""Large stacks for compile threads: the libraries recurse over rules."""

from __future__ import annotations

import threading
from typing import Final

STACK_BYTES: Final = 256 << 20
"""Stack size. An overflow would end the process. Only the used part takes memory."""
_lock = threading.Lock()


def with_stack(thread: threading.Thread) -> None:
    """Start ``thread`` with a stack of ``STACK_BYTES``. The stack size is a process-wide setting and is
    restored."""
    with _lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
