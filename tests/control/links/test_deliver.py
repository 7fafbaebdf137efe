"""Events of one message for several requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from weft.common.errors import WeftError
from weft.control.fleet.instance_table import Patience
from weft.control.links.flow import Flow
from weft.control.links.links import Links
from weft.types.messages import TokenEvent


class Nobody:
    """An owner without processes."""

    shared, elastic = False, True

    def present(self, kept: int = 0) -> dict[str, WeftError]:
        return {}


def test_an_error_of_one_request_loses_no_events_of_others() -> None:
    async def run() -> None:
        links = Links(Nobody(), Patience())  # type: ignore[arg-type]

        def observe(event: TokenEvent) -> None:
            if event.token_ids == (1,):
                raise RuntimeError("a metric failed")

        bad, good = Flow([1], observe), Flow([2])
        links._flows = {1: bad, 2: good}
        links._deliver([TokenEvent(sequence=number, token_ids=(1,)) for number in (1, 2)])
        links._deliver([TokenEvent(sequence=number, token_ids=(2,)) for number in (1, 2)])
        tokens = [event.token_ids for event in await asyncio.wait_for(good.next(), 1)]
        assert [token for ids in tokens for token in ids] == [1, 2]
        with pytest.raises(WeftError, match="failed to answer"):  # and no token after the lost token
            await asyncio.wait_for(bad.next(), 1)
        assert not bad.open
        await links.close(shutdown=False)

    asyncio.run(run())


def test_a_slow_event_loop_merges_events_and_keeps_their_order() -> None:
    """With a write per token, a server that is too slow would fall further and further behind."""

    async def run() -> None:
        links, flow, taken = Links(Nobody(), Patience()), Flow([1]), list[int]()  # type: ignore[arg-type]
        links._flows = {1: flow}
        link = SimpleNamespace(behind=False)
        links._links = {"a": link}  # type: ignore[dict-item]

        def take(events: list[TokenEvent]) -> bool:
            taken.extend(token for event in events for token in event.token_ids)
            return True

        reader = asyncio.create_task(flow.next(take))
        await asyncio.sleep(0)
        for token, behind in enumerate([False, True, True, False]):
            link.behind = behind
            links._deliver([TokenEvent(sequence=1, token_ids=(token,))])
        assert taken == [0]
        assert [event.token_ids for event in await asyncio.wait_for(reader, 1)] == [(1, 2, 3)]
        links._links = {}
        await links.close(shutdown=False)

    asyncio.run(run())
