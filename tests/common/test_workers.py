"""Processes that read large requests: one payload at a time, and a failure affects only its payload."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft.common.errors import DeadlineExceeded, Unavailable, WeftError
from weft.common.workers import WorkerPool

PROGRAM = """
import os, socket, struct, sys, time
link = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
def take():
    header = link.read(4)
    return link.read(struct.unpack("<I", header)[0]) if len(header) == 4 else b""
greeting = take()
while payload := take():
    if payload == b"die":
        os._exit(3)
    if payload == b"hang":
        time.sleep(600)
    if payload == b"pid":
        payload = str(os.getpid()).encode()
    if payload.startswith(b"wait for "):
        while not os.path.exists(payload[9:].rstrip()):
            time.sleep(0.005)
    answer = greeting + payload
    link.write(struct.pack("<I", len(answer)) + answer)
    link.flush()
"""


def run(
    work: Callable[[WorkerPool], Coroutine[Any, Any, None]], *, most: int = 1, seconds: float = 60
) -> None:
    async def main() -> None:
        pool = WorkerPool((sys.executable, "-c", PROGRAM), b"> ", most, seconds)
        try:
            await work(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), deadline(120)))


def test_payloads_of_every_size_are_answered_by_processes_that_stay() -> None:
    async def work(pool: WorkerPool) -> None:
        assert pool.processes == 0
        assert await pool.call(b"a") == b"> a"
        large = os.urandom(9 << 20)
        assert await pool.call(large) == b"> " + large
        assert await pool.call(b"in ", b"", large, b" pieces") == b"> in " + large + b" pieces"
        first = await pool.call(b"pid")
        assert first == await pool.call(b"pid")
        answers = await asyncio.gather(*(pool.call(str(n).encode()) for n in range(50)))
        assert answers == [f"> {n}".encode() for n in range(50)]
        assert pool.processes == 1

    run(work)


def test_a_process_that_dies_fails_its_payload_alone() -> None:
    async def work(pool: WorkerPool) -> None:
        before = await pool.call(b"pid")
        dying, other = pool.call(b"die"), pool.call(b"x")
        found = await asyncio.gather(dying, other, return_exceptions=True)
        assert isinstance(found[0], WeftError)
        assert found[1] == b"> x"
        assert await pool.call(b"pid") != before

    run(work)


def test_a_process_that_died_while_it_had_no_work_fails_nothing() -> None:
    async def work(pool: WorkerPool) -> None:
        number = int((await pool.call(b"pid")).removeprefix(b"> "))
        os.kill(number, signal.SIGKILL)
        os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)
        assert await pool.call(b"x") == b"> x"

    run(work)


def test_a_process_that_takes_too_long_is_ended() -> None:
    async def work(pool: WorkerPool) -> None:
        with pytest.raises(DeadlineExceeded):
            await pool.call(b"hang")
        assert pool.processes == 0

    run(work, seconds=2)


def test_small_payloads_overtake_large_ones_that_wait(tmp_path: Path) -> None:
    async def work(pool: WorkerPool) -> None:
        order: list[str] = []

        async def ask(name: str, payload: bytes) -> None:
            await pool.call(payload)
            order.append(name)

        gate = tmp_path / "open"
        tasks = [asyncio.create_task(ask("gate", b"wait for " + str(gate).encode()))]
        await asyncio.sleep(0)
        for name, size in (("huge", 8 << 20), ("large", 4 << 20), ("small", 10)):
            tasks.append(asyncio.create_task(ask(name, b"x" * size)))
            await asyncio.sleep(0)
        gate.touch()
        await asyncio.gather(*tasks)
        assert order == ["gate", "small", "large", "huge"]

    run(work)


def test_closing_ends_processes_and_waiting_calls() -> None:
    async def work(pool: WorkerPool) -> None:
        pid = int((await pool.call(b"pid")).split()[1])
        waiting = [asyncio.create_task(pool.call(b"hang")) for _ in range(3)]
        await asyncio.sleep(0.1)
        await pool.close()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, Unavailable) for error in found)
        with pytest.raises(Unavailable):
            await pool.call(b"x")
        for _ in range(500):
            if not Path(f"/proc/{pid}").exists():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the process still lives")

    run(work)
