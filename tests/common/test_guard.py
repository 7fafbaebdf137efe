"""Processes for work that may run away: each ends by CPU time, by its deadline, or when idle."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.slowness import deadline
from weft.common.errors import DeadlineExceeded, Unavailable
from weft.common.guard import Guard
from weft.common.workers import WorkerDied

PROGRAM = """
import os, time
from weft.common.confine import confine
from weft.common.workers import serve

def prepare(greeting):
    confine(256 << 20)
    def answer(payload):
        if payload == b"die":
            os._exit(3)
        if payload == b"spin":
            while True:
                sum(range(10000))
        if payload == b"native":
            str(10 ** 5_000_000)
        if payload == b"sleep":
            time.sleep(600)
        if payload == b"memory":
            try:
                bytearray(1 << 30)
            except MemoryError:
                return (b"no memory",)
        if payload == b"pid":
            return (str(os.getpid()).encode(),)
        return (greeting, payload)
    return answer

import sys
sys.set_int_max_str_digits(0)
serve(prepare, 0, 0.5, reports_ready=True)
"""


@contextmanager
def guarding(idle: float = 60.0) -> Iterator[Guard]:
    guard = Guard((sys.executable, "-c", PROGRAM), b"> ", idle=idle)
    try:
        yield guard
    finally:
        guard.close()


def gone(pid: int) -> bool:
    until = time.monotonic() + deadline(20)
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_a_payload_is_answered_by_a_process_that_stays() -> None:
    with guarding() as guard:
        assert guard.call(b"a", deadline(30)) == b"> a"
        large = os.urandom(3 << 20)
        assert guard.call(large, deadline(30)) == b"> " + large
        assert guard.call(b"pid", deadline(30)) == guard.call(b"pid", deadline(30))
        assert guard.processes == 1


@pytest.mark.parametrize("work", ["spin", "native"])
def test_cpu_time_ends_a_process_also_inside_a_native_call(work: str) -> None:
    with guarding() as guard:
        pid = int(guard.call(b"pid", deadline(30)))
        with pytest.raises(DeadlineExceeded, match="CPU"):
            guard.call(work.encode(), deadline(120))
        assert gone(pid)
        assert guard.processes >= 1  # the next caller finds a ready process
        assert guard.call(b"next", deadline(30)) == b"> next"


def test_a_process_that_dies_or_wants_memory_fails_its_payload_alone() -> None:
    with guarding() as guard:
        assert guard.call(b"memory", deadline(30)) == b"no memory"
        with pytest.raises(WorkerDied, match="status 3"):
            guard.call(b"die", deadline(30))
        assert guard.call(b"next", deadline(30)) == b"> next"


def test_a_process_that_is_late_is_ended() -> None:
    with guarding() as guard:
        pid = int(guard.call(b"pid", deadline(30)))
        with pytest.raises(DeadlineExceeded):
            guard.call(b"sleep", 0.1)
        assert gone(pid)


def test_closing_ends_processes_and_waiting_calls() -> None:
    with guarding() as guard, ThreadPoolExecutor(1) as pool:
        pid = int(guard.call(b"pid", deadline(30)))
        waiting = pool.submit(guard.call, b"sleep", deadline(60))
        until = time.monotonic() + deadline(20)
        while guard._idle and time.monotonic() < until:
            time.sleep(0.005)
        guard.close()
        assert isinstance(waiting.exception(deadline(20)), Unavailable)
        assert gone(pid)
        with pytest.raises(Unavailable):
            guard.call(b"a", 1)


def test_a_process_without_work_ends() -> None:
    before = threading.active_count()
    with guarding(idle=0.1) as guard:
        pid = int(guard.call(b"pid", deadline(30)))
        assert gone(pid)
        assert guard.call(b"next", deadline(30)) == b"> next"
    assert threading.active_count() <= before + 1


def test_a_long_payload_makes_a_spare_process_ready() -> None:
    with guarding() as guard, ThreadPoolExecutor(1) as pool:
        guard.call(b"a", deadline(30))
        assert guard.processes == 1
        waiting = pool.submit(guard.call, b"sleep", deadline(60))
        until = time.monotonic() + deadline(20)
        while not (guard.processes == 2 and guard._idle) and time.monotonic() < until:
            time.sleep(0.005)
        assert guard.processes == 2
        assert not waiting.done()
        guard.close()
