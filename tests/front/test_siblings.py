"""Calls that one API server carries out for another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.common.errors import Unavailable
from weft.front.siblings import Siblings
from weft.front.weight_routes import _carried


async def pair(folder: Path, carry: Callable[[str], Awaitable[bytes]]) -> tuple[Siblings, Siblings]:
    """Return the carrier and another API server."""
    names = ["0", "1"]
    made = [Siblings(name, folder, lambda: names) for name in names]
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


def test_a_process_that_started_again_carries_out_no_call_under_its_former_name() -> None:
    front: Any = SimpleNamespace(siblings=Siblings("0", Path(), list, lambda: "1"))
    assert b"another API server changes the weights now" in asyncio.run(_carried(front, "start {}"))
