"""Waits of the host for work of a GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weft.common.errors import EngineDead

SPIN_S = 50e-6
"""Seconds of asking without a pause. A step that was waiting for the host is complete by then, and a sleep
takes longer."""
NAP_S = 20e-6
"""Shortest sleep between two questions."""
SHARE = 256
"""A sleep is at most this part of the time waited so far: a wait is at most 0.4% too long, and a wait of many
milliseconds takes little of a core."""
TIMER_SLACK_NS = 1000
"""Timer slack of a waiting thread, in nanoseconds."""
_SET, _GET = 29, 30  # PR_SET_TIMERSLACK and PR_GET_TIMERSLACK of <sys/prctl.h>


def wait_until(
    there: Callable[[], bool], deadline: float, late: str, check: Callable[[], None] = lambda: None
) -> None:
    """Return when ``there()`` is True. Raises EngineDead(``late``) after ``deadline`` (monotonic seconds).

    ``there`` asks an event of the device, which takes about a microsecond. The wait asks again and again,
    because a wait inside the driver has no deadline and would outlive a lost peer. A sleep does not hold the
    GIL. ``check`` is called before each sleep and may raise.
    """
    began = time.monotonic()
    while time.monotonic() - began < SPIN_S:
        if there():
            return
    with _exact_sleeps():
        while not there():
            now = time.monotonic()
            if now > deadline:
                raise EngineDead(late)
            check()
            time.sleep(max(NAP_S, (now - began) / SHARE))


@contextmanager
def _exact_sleeps() -> Iterator[None]:
    """Make sleeps of this thread exact to a microsecond. The kernel may end a sleep later by the timer slack
    of the thread, usually 50 us, to wake for several timers at once. Elsewhere than on Linux: do nothing."""
    if _prctl is None:
        yield
        return
    before = _prctl(_GET, 0, 0, 0, 0)
    if before < 0:  # a sandbox without this call: the same number would set the longest slack
        yield
        return
    _prctl(_SET, TIMER_SLACK_NS, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(_SET, before, 0, 0, 0)


def _find_prctl() -> Callable[..., int] | None:
    found: Any = getattr(ctypes.CDLL(None), "prctl", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    return found


_prctl = _find_prctl()
