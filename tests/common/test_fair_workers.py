"""Clients of a pool of processes share them by what their payloads cost."""

from __future__ import annotations

import asyncio

import pytest

from weft.common import workers
from weft.common.errors import Overloaded
from weft.common.workers import WorkerPool


class _Recorded(WorkerPool):
    """A pool whose processes are its test: payloads are taken in turns, and answered at once."""

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
