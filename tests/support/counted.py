"""Drop the counts of a test's log lines, which would be logged up to a minute later, in another test."""

from __future__ import annotations

import threading

from weft.common.counted_log import CountedLog, Tally


def drop_counts() -> None:
    """Cancel the timers of all counted logs of this process. A log with a cancelled timer begins anew."""
    for thread in threading.enumerate():
        if not isinstance(thread, threading.Timer):
            continue
        log = getattr(thread.function, "__self__", None)
        if isinstance(log, CountedLog):
            thread.cancel()
            with log._lock:
                log._timer, log._tally = None, Tally(log._tally._window)
