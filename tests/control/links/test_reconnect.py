"""A broken TCP connection to a live engine causes no restart and no failed request."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping

import pytest

from tests.control.links.test_links import LENGTH, PROMPT, read, submit, until
from tests.front.fake_server import FakeEngines
from tests.support.slowness import deadline
from tests.support.tcp_proxy import TcpProxy
from weft.common.errors import WeftError
from weft.common.folder import private_folder
from weft.control.fleet.instance_table import Patience
from weft.control.links.link import Address
from weft.control.links.links import Links

ALL = (PROMPT * LENGTH)[:LENGTH]


class RemoteOwner:
    """Own engines behind proxies, which links treat as remote."""

    shared = False
    elastic = False

    def __init__(self, proxies: Mapping[str, TcpProxy], addresses: Mapping[str, Address]) -> None:
        self.so: dict[str, Address | WeftError] = {
            name: address._replace(endpoint=f"tcp://127.0.0.1:{proxies[name].port}")
            for name, address in addresses.items()
        }
        self.lost: list[str] = []

    def present(self, kept: int = 0) -> Mapping[str, Address | WeftError]:
        return self.so

    def replace(self, instance: str, incarnation: int, error: WeftError) -> None:
        self.lost.append(error.message)

    def drain(self) -> None: ...


def over_tcp(
    work: Callable[[Links, RemoteOwner, list[TcpProxy]], Awaitable[None]],
    engines: int = 1,
    timeout: float = 10.0,
) -> None:
    """Runs ``work`` with links to so many scripted heads, each behind a proxy."""

    async def run() -> None:
        folder = private_folder()
        made = FakeEngines(str(folder), engines, [], False)
        addresses = {name: made.start(name, 1) for name in made.members}
        proxies = {name: TcpProxy(str(address.endpoint)) for name, address in addresses.items()}
        try:
            async with asyncio.timeout(deadline(60)):
                for name, proxy in proxies.items():
                    await proxy.__aenter__()
                    while not (folder / f"head-{name}-1").exists():
                        await asyncio.sleep(0.02)
                owner = RemoteOwner(proxies, addresses)
                links = Links(owner, Patience(), link_timeout=timeout)
                try:
                    await links.start()
                    await work(links, owner, list(proxies.values()))
                finally:
                    await links.close()
                    for proxy in proxies.values():
                        await proxy.__aexit__()
        finally:
            for address in addresses.values():
                address.process.kill()  # type: ignore[attr-defined]
            made.close()
            shutil.rmtree(folder, ignore_errors=True)

    asyncio.run(run())


def test_streams_go_on_after_each_of_several_resets() -> None:
    async def work(links: Links, owner: RemoteOwner, proxies: list[TcpProxy]) -> None:
        tokens: list[int] = []
        flow = submit(links, 1)
        for number, so_far in enumerate((5, 20, 40, 60, 80)):  # more often than a request may lose its engine
            await read(flow, tokens, so_far)
            # Tokens from before the last reset may come before the next connection.
            await until(lambda least=number: proxies[0].accepted > least)
            proxies[0].reset()
        await read(flow, tokens)
        assert tokens == ALL
        assert proxies[0].accepted == 6
        assert (owner.lost, links.restarts, links.failovers) == ([], 0, 0)

    over_tcp(work)


@pytest.mark.slow
def test_requests_that_come_while_connections_are_refused_wait() -> None:
    async def work(links: Links, owner: RemoteOwner, proxies: list[TcpProxy]) -> None:
        first: list[int] = []
        flow = submit(links, 1)
        await read(flow, first, 5)
        proxies[0].refuses = True
        proxies[0].reset()
        accepted = proxies[0].accepted
        flows = [submit(links, number) for number in range(2, 5)]  # before the loss is known, and after
        await until(lambda: not links.fleet.table.takers())
        flows += [submit(links, number) for number in range(5, 8)]
        await until(lambda: proxies[0].accepted > accepted + 2)
        proxies[0].refuses = False
        await read(flow, first)
        assert first == ALL
        for other in flows:
            tokens: list[int] = []
            await read(other, tokens)
            assert tokens == ALL
        assert (owner.lost, links.restarts) == ([], 0)

    over_tcp(work)


@pytest.mark.slow
def test_new_requests_go_to_an_engine_that_can_be_reached() -> None:
    async def work(links: Links, owner: RemoteOwner, proxies: list[TcpProxy]) -> None:
        proxies[0].refuses = True
        proxies[0].reset()
        await until(lambda: [one.name for one in links.fleet.table.takers()] == ["1"])
        for number in range(2):
            await read(submit(links, number), [])
        proxies[0].refuses = False
        await until(lambda: len(links.fleet.table.takers()) == 2)
        assert owner.lost == []

    over_tcp(work, engines=2)


def test_a_dead_connection_is_replaced() -> None:
    """Half-open connection: a router has dropped its state silently."""

    async def work(links: Links, owner: RemoteOwner, proxies: list[TcpProxy]) -> None:
        tokens: list[int] = []
        flow = submit(links, 1)
        await read(flow, tokens, 5)
        proxies[0].go_silent()
        await read(flow, tokens)
        assert tokens == ALL
        assert (owner.lost, links.restarts) == ([], 0)

    over_tcp(work, timeout=1.0)


def test_one_that_cannot_be_reached_for_too_long_is_lost() -> None:
    async def work(links: Links, owner: RemoteOwner, proxies: list[TcpProxy]) -> None:
        proxies[0].refuses = True
        proxies[0].reset()
        await until(lambda: bool(owner.lost))
        assert owner.lost == ["the engine's process does not answer"]

    over_tcp(work, timeout=1.0)
