"""Links follow the owner of their instances' processes: new incarnations, draining, retirement."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.front.fake_server import FakeEngines
from weft.common.errors import EngineDead, Unavailable, WeftError
from weft.common.folder import private_folder
from weft.control.fleet.instance_table import Patience
from weft.control.fleet.instances import InstanceState
from weft.control.links.flow import Flow
from weft.control.links.link import Address
from weft.control.links.links import Links
from weft.types import messages as m
from weft.types.sampling import TokenParams

PROMPT = [10, 20, 30]
LENGTH = 300
SECONDS = 120.0


class Owner:
    """An owner with a state set by the test."""

    shared = False
    elastic = False

    def __init__(self, count: int, roles: Sequence[m.Role] = ()) -> None:
        self.folder: Path = private_folder()
        self.engines = FakeEngines(str(self.folder), count, [], False, roles)
        self.so: dict[str, Address | WeftError] = {}
        self.lost: list[tuple[str, int]] = []
        self.fails = False
        for name in self.engines.members:
            self.start(name, 1)

    def start(self, name: str, incarnation: int) -> None:
        self.so[name] = self.engines.start(name, incarnation)

    def change(self, name: str, **changes: bool) -> None:
        address = self.so[name]
        assert isinstance(address, Address)
        self.so[name] = address._replace(**changes)  # type: ignore[arg-type]

    def present(self, kept: int = 0) -> Mapping[str, Address | WeftError]:
        return self.so

    async def revive(self, name: str) -> list[str]:
        raise AssertionError("nobody asks for it")

    def replace(self, instance: str, incarnation: int, error: WeftError) -> None:
        self.lost.append((instance, incarnation))
        if self.fails:
            raise OSError("no more processes")


def with_links(
    count: int,
    work: Callable[[Links, Owner], Awaitable[None]],
    *roles: m.Role,
    recovery: float = 120.0,
    **settings: Any,
) -> None:
    """Runs ``work`` with links to so many scripted heads."""

    async def run() -> None:
        owner = Owner(count, roles)
        links = Links(owner, Patience(role=0.3, recovery=recovery), **settings)
        try:
            async with asyncio.timeout(SECONDS):
                await links.start()
                await work(links, owner)
        finally:
            await links.close()
            owner.engines.close()
            shutil.rmtree(owner.folder, ignore_errors=True)

    asyncio.run(run())


def submit(links: Links, sequence: int) -> Flow:
    return links.submit(
        [
            m.Submit(
                sequence=sequence,
                request=1000 + sequence,
                seed=1,
                prompt_ids=m.ids_to_bytes(PROMPT),
                params=TokenParams(max_tokens=LENGTH),
            )
        ]
    )


async def read(flow: Flow, tokens: list[int], until: int = LENGTH) -> None:
    while len(tokens) < until:
        for event in await flow.next():
            assert event.error is None, event.error
            tokens += event.token_ids


def state(links: Links, name: str) -> InstanceState:
    return next(one.state for one in links.instances if one.name == name)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_a_process_that_another_front_had_replaced() -> None:
    """The API server assumes a live process: its stream continues at the next one without a second
    replacement.
    """

    async def work(links: Links, owner: Owner) -> None:
        tokens: list[int] = []
        flow = submit(links, 1)
        await read(flow, tokens, 20)
        owner.start("0", 2)
        await read(flow, tokens)
        assert tokens == (PROMPT * LENGTH)[:LENGTH]
        assert set(owner.lost) <= {("0", 1)}
        assert links.restarts == 1

    with_links(1, work)


def test_one_that_drains_gets_nothing_new() -> None:
    async def work(links: Links, owner: Owner) -> None:
        first = submit(links, 1)
        tokens: list[int] = []
        await read(first, tokens, 5)
        (there,) = (one.name for one in links.instances if one.open)
        owner.change(there, draining=True)
        await until(lambda: state(links, there) is InstanceState.DRAINING)
        others = [submit(links, 2 + number) for number in range(4)]
        assert [len(one.open) for one in links.instances if one.name == there] == [1]
        await read(first, tokens)
        for other in others:
            await read(other, [])

    with_links(2, work)


def kill(owner: Owner, name: str) -> None:
    address = owner.so[name]
    assert isinstance(address, Address)
    address.process.kill()  # type: ignore[attr-defined]


@pytest.mark.requirement("E15")
def test_a_stream_of_a_pair_goes_on_with_others_when_one_dies() -> None:
    async def work(links: Links, owner: Owner) -> None:
        flows = [submit(links, number) for number in range(1, 5)]
        tokens: list[list[int]] = [[] for _ in flows]
        for flow, its in zip(flows, tokens, strict=True):
            await read(flow, its, 5)
        assert links.paired == 4
        assert [len(one.open) for one in links.instances] == [0, 2, 2]
        kill(owner, "1")
        for flow, its in zip(flows, tokens, strict=True):
            await read(flow, its)
            assert its == (PROMPT * LENGTH)[:LENGTH]
        assert (links.paired, links.failovers) == (6, 2)
        assert {one.load for one in links.instances} == {0}
        assert links.progressing(60.0)
        assert links.alive
        kill(owner, "2")
        await until(lambda: not links.alive)
        assert not links.progressing(60.0)  # the engine is up but cannot serve
        waits = submit(links, 9)
        (event,) = await waits.next()
        assert event.error is not None
        assert event.error.http_status == 503
        with pytest.raises(Unavailable, match="no group of the role decode takes requests"):
            submit(links, 10)
        owner.start("2", 2)
        await until(lambda: links.alive)
        await read(submit(links, 11), [])

    with_links(3, work, "prefill", "decode", "decode", recovery=0.6)


@pytest.mark.parametrize("local", [True, False])
def test_without_one_that_prefills_others_do_it_if_they_may(local: bool) -> None:
    async def work(links: Links, owner: Owner) -> None:
        kill(owner, "0")
        await until(lambda: not links.whole)
        assert links.alive is local
        assert links.progressing(60.0) is local
        flow = submit(links, 1)
        if local:
            await read(flow, [])
            assert (links.local_prefills, links.paired) == (1, 0)
        else:
            (event,) = await flow.next()
            assert event.error is not None
            assert event.error.http_status == 503

    with_links(2, work, "prefill", "decode", local_prefill=local, recovery=0.6)


def test_prompts_are_hashed_where_there_is_a_choice() -> None:
    async def work(links: Links, owner: Owner) -> None:
        made = m.Submit(
            sequence=1, request=2, seed=1, prompt_ids=m.ids_to_bytes(PROMPT), params=TokenParams()
        )
        assert bool(links.hash_prompts([made])) is (len(links.instances) > 2)

    with_links(2, work, "prefill", "decode")
    with_links(3, work, "prefill", "decode", "decode")


@pytest.mark.slow
def test_one_that_is_retired_is_gone_and_why() -> None:
    async def work(links: Links, owner: Owner) -> None:
        tokens: list[int] = []
        flow = submit(links, 1)
        await read(flow, tokens, 5)
        for name in owner.engines.members:
            owner.so[name] = EngineDead("it died too often")
        errors: list[str] = []
        while not errors:
            errors += [event.error.message for event in await flow.next() if event.error is not None]
        assert errors == ["it died too often"]
        assert links.failure is not None
        assert links.died.is_set()
        # An API server that starts now has nothing to wait for.
        late = Links(owner, Patience())
        with pytest.raises(EngineDead, match="no engine"):
            await late.start()
        await late.close()

    with_links(2, work)


@pytest.mark.slow
def test_an_error_of_the_owner_stops_nothing_else() -> None:
    """Streams continue at the other engine, and later events still arrive."""

    async def work(links: Links, owner: Owner) -> None:
        owner.fails = True
        flows = [submit(links, number) for number in range(1, 5)]
        tokens: list[list[int]] = [[] for _ in flows]
        for flow, its in zip(flows, tokens, strict=True):
            await read(flow, its, 5)
        process = next(address.process for address in owner.so.values() if isinstance(address, Address))
        process.kill()  # type: ignore[attr-defined]
        for flow, its in zip(flows, tokens, strict=True):
            await read(flow, its)
            assert its == (PROMPT * LENGTH)[:LENGTH]
        assert len(owner.lost) == 1
        await read(submit(links, 9), [])
        (lost,) = {name for name, _ in owner.lost}
        owner.fails = False
        owner.start(lost, 2)
        await until(lambda: state(links, lost) is InstanceState.UP)

    with_links(2, work)


@pytest.mark.slow
def test_a_front_that_stood_still_tries_a_connection_again_before_it_reports_a_loss() -> None:
    """Its engines gave up the silent connection but live, so no engine is restarted."""

    async def work(links: Links, owner: Owner) -> None:
        link = links._links["0"]
        now = asyncio.get_running_loop().time()
        link._broken_at = now - 10
        link.excuse(now)
        link.look(now)
        assert owner.lost == []
        link.look(now + links._link_timeout)
        await until(lambda: owner.lost == [("0", 1)])

    with_links(1, work)
