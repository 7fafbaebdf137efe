"""Clients share a pool of processes by the cost of their payloads."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.support.slowness import deadline
from weft.common import workers
from weft.common.errors import Overloaded
from weft.common.workers import CpuSpent, WorkerPool


class _Recorded(WorkerPool):
    """A pool with the test in place of processes: payloads are taken in turns and answered at once."""

    def __init__(self) -> None:
        super().__init__(("none",), b"", 0, 1.0, each=1)

    async def taken(self, count: int) -> list[bytes]:
        await asyncio.sleep(0)  # callers are tasks: each has run to its wait
        found = []
        for _ in range(count):
            item = self._next(self._clients())
            item.answer.set_result(b"")
            found.append(bytes(item.payload[0][:1]))
        return found


def test_a_client_that_floods_does_not_delay_another_one() -> None:
    async def run() -> None:
        pool = _Recorded()
        asked = [asyncio.ensure_future(pool.call(b"a", client=0, cost=64e6)) for _ in range(100)]
        asked += [asyncio.ensure_future(pool.call(b"b", client=1, cost=1e3)) for _ in range(20)]
        first = await pool.taken(21)
        assert first.count(b"b") == 20
        await pool.taken(99)
        await asyncio.gather(*asked)

    asyncio.run(run())


def test_equal_clients_take_turns_and_none_saves_turns_up() -> None:
    async def run() -> None:
        pool = _Recorded()
        asked = [asyncio.ensure_future(pool.call(b"a", client=0)) for _ in range(20)]
        assert await pool.taken(10) == [b"a"] * 10
        asked += [asyncio.ensure_future(pool.call(b"b", client=1)) for _ in range(10)]
        both = await pool.taken(10)
        assert 4 <= both.count(b"b") <= 6
        await pool.taken(10)
        await asyncio.gather(*asked)

    asyncio.run(run())


def test_a_client_cannot_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CLIENT_WAITING", 3)

    async def run() -> None:
        pool = _Recorded()
        asked = [asyncio.ensure_future(pool.call(b"a", client=0)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pool.call(b"a", client=0)
        asked.append(asyncio.ensure_future(pool.call(b"b", client=1)))
        await pool.taken(4)
        await asyncio.gather(*asked)

    asyncio.run(run())


def test_long_work_of_one_client_leaves_a_process_to_others() -> None:
    """The limit holds even if the first client came early and no other client had asked yet."""
    hang = "import socket, sys; link = socket.socket(fileno=int(sys.argv[1])); link.recv(1)\n"
    program = (
        hang + "while data := link.recv(99): link.sendall(b'\\x01\\0\\0\\0a') if b'short' in data else 0"
    )

    async def run() -> None:
        pool = WorkerPool((sys.executable, "-c", program), b"", 2, deadline(60), each=1)
        asked = [asyncio.ensure_future(pool.call(b"long", client=0)) for _ in range(4)]
        try:
            assert await pool.call(b"short", client=1) == b"a"
            assert not any(one.done() for one in asked)
        finally:
            await pool.close()
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), deadline(60)))


def test_the_kernel_ends_work_that_takes_too_much_cpu_time() -> None:
    program = (
        "from weft.common.workers import serve\n"
        "def work(data):\n"
        "    while data == b'endless': pass\n"
        "    return (data,)\n"
        "serve(lambda greeting: work, 0, 0.2)"
    )

    async def run() -> None:
        pool = WorkerPool((sys.executable, "-c", program), b"", 1, deadline(60))
        try:
            with pytest.raises(CpuSpent):
                await pool.call(b"endless")
            assert await pool.call(b"short") == b"short"
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), deadline(60)))
