"""The store of a rendezvous beside a process that holds the lock of the file."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.slowness import deadline
from weft.parallel.group_comm import CommLost
from weft.parallel.store import join_store

HOLD = """
import fcntl, sys, time
held = open(sys.argv[1], "ab")
fcntl.flock(held, fcntl.LOCK_EX)
print(flush=True)
time.sleep(600)
"""


def test_a_process_that_stopped_with_the_store_locked_stops_no_other(tmp_path: Path) -> None:
    """Joining fails within its time-out. Other threads, which send heartbeats, continue meanwhile."""
    path = tmp_path / "store"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    watchdog = threading.Timer(deadline(20), holder.kill)  # else a wait under Python's lock would never end
    watchdog.start()
    beats: list[float] = []
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.02):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        thread.start()
        with pytest.raises(CommLost, match="cannot join"):
            join_store(f"file://{path}", 0.5)
        assert holder.poll() is None
        assert len(beats) > 5
    finally:
        done.set()
        holder.kill()
        holder.wait()
        watchdog.cancel()
        if thread.is_alive():
            thread.join()
    assert join_store(f"file://{path}", 0.5) is not None
