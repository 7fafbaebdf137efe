"""Processes that share a folder, and processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store.stores import get, open_store, put, record
from weft.store.errors import RecordError

ROOT = Path(__file__).resolve().parents[2]
SIZE = 60_000
WORKER = """
import sys
from pathlib import Path
from tests.store.stores import get, open_store, put, record
from weft.store.errors import RecordError

begin, mode = int(sys.argv[2]), sys.argv[3]
store = open_store(Path(sys.argv[1]), budget=64 << 20)
print("ready", flush=True)
for number in range(begin, begin + 100_000):
    if mode == "store":
        if put(store, record(number), {size}) == "":
            print(number, flush=True)
    else:
        store.scan()
        try:
            assert get(store, record(number % 40), {size}), "wrong bytes"
        except RecordError:
            pass
        print("read", flush=True)
"""


def worker(folder: Path, begin: int, mode: str) -> subprocess.Popen[str]:
    """Start a process that stores or reads without end; the first line says that the store is open."""
    code = WORKER.replace("{size}", str(SIZE))
    made = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(begin), mode],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    return made


def killed(process: subprocess.Popen[str]) -> list[str]:
    """Kill a process without warning. Return the lines that the process wrote."""
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate()
    return [line for line in out.splitlines() if line]


def test_a_process_killed_while_it_stores_leaves_whole_records(tmp_path: Path) -> None:
    process = worker(tmp_path, 0, "store")
    assert process.stdout is not None
    first = process.stdout.readline()  # on a busy machine the first record takes long
    time.sleep(0.05)
    stored = [int(line) for line in (first, *killed(process))]
    store = open_store(tmp_path)
    # Every record that the process reported is there, and the last write may be there.
    assert all(get(store, record(number), SIZE) for number in stored)
    assert store.stats().records - len(stored) in (0, 1)
    assert store.stats().corrupt == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_kills_in_stores_and_loads(tmp_path: Path, seed: int) -> None:
    """Two writers and a reader share a folder and are killed at random times."""
    draw, stored = random.Random(seed), set[int]()
    for turn in range(4):
        one = worker(tmp_path, 1000 * turn, "store")
        two = worker(tmp_path, 1000 * turn + 500_000, "store")
        reader = worker(tmp_path, 0, "read")
        time.sleep(draw.uniform(0.02, 0.5))
        processes = [one, two, reader]
        draw.shuffle(processes)
        for process in processes:
            assert process.poll() is None, "a process ended by itself"
            lines = killed(process)
            stored |= {int(line) for line in lines if line != "read"}
    store, right = open_store(tmp_path, budget=64 << 20), 0
    for number in stored:
        try:
            assert get(store, record(number), SIZE)
            right += 1
        except RecordError:
            pass
    stats = store.stats()
    assert not store.off
    # Only eviction takes records away: the budget holds about 1,000.
    assert right >= min(len(stored), 700)
    assert stats.corrupt == 0
    assert put(store, record(10**6), SIZE) == ""
