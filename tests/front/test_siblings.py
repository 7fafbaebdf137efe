"""Calls that one API server carries out for another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from weft.common.errors import Unavailable
from weft.front.siblings import Siblings


async def pair(
    folder: Path, carry: Callable[[str], Awaitable[bytes]], carrier: str = "0"
) -> tuple[Siblings, Siblings]:
    """Return the API server ``0``, which has ``carry``, and another API server."""
    names = ["0", "1"]
    made = [Siblings(name, folder, lambda: names, lambda: carrier) for name in names]
    made[0].carry = carry
    for one in made:
        await one.start(lambda: b"", lambda rid: False, lambda second: b"")
    return made[0], made[1]


def test_a_call_is_cancelled_when_its_api_server_is_gone(tmp_path: Path) -> None:
    """As a call of a client that leaves, on a server of one API server."""
    ended = asyncio.Event()

    async def carry(call: str) -> bytes:
        assert call == "init {}"
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return b""

    async def run() -> None:
        carrier, other = await pair(tmp_path, carry)
        call = asyncio.create_task(other.ask_carrier(carrier.name, "init {}", 60))
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        call.cancel()
        async with asyncio.timeout(5):
            await ended.wait()
        for one in (carrier, other):
            await one.close()

    asyncio.run(run())


def test_a_call_that_fails_unexpectedly_keeps_nobody_waiting(tmp_path: Path) -> None:
    async def carry(call: str) -> bytes:
        if call == "good":
            return b"done"
        raise KeyError(call)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        carrier, other = await pair(tmp_path, carry)
        assert await other.ask_carrier(carrier.name, "good", 5) == b"done"
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable, match="did not answer"):
                await other.ask_carrier(carrier.name, "bad", 60)
        for one in (carrier, other):
            await one.close()

    asyncio.run(run())


def test_a_process_that_started_again_carries_out_no_call_under_its_former_name(tmp_path: Path) -> None:
    async def carry(call: str) -> bytes:
        return b"done"

    async def run() -> None:
        former, other = await pair(tmp_path, carry, carrier="1")
        with pytest.raises(Unavailable, match="did not answer"):
            await other.ask_carrier(former.name, "start {}", 5)
        for one in (former, other):
            await one.close()

    asyncio.run(run())
