"""Events between engine link and handler are merged when unread, never lost, and stay in order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.common.errors import Cancelled, EngineDead
from weft.control.links.flow import MERGE_AT, Flow, merge
from weft.types.messages import CacheMiss, LogprobColumns, TokenEvent


def columns(ids: list[int], width: int) -> LogprobColumns:
    grid = np.repeat(np.asarray(ids, "<i4"), width)
    return LogprobColumns(
        width=width,
        ids=grid.tobytes(),
        values=grid.astype("<f4").tobytes(),
        rank=np.asarray(ids, "<i4").tobytes(),
    )


event = st.builds(
    lambda ids, width, prompt, cached, accepted, rejected: TokenEvent(
        sequence=1,
        token_ids=tuple(ids),
        logprobs=columns(ids, width) if width and ids else None,
        prompt_logprobs=columns(prompt, 2) if prompt else None,
        num_cached=cached,
        accepted=accepted,
        rejected=rejected,
    ),
    st.lists(st.integers(0, 99), max_size=3),
    st.integers(0, 3),
    st.lists(st.integers(0, 99), max_size=3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
)


def flat(events: list[TokenEvent]) -> tuple[list[int], list[tuple[int, int, float]], list[int]]:
    tokens = [token for e in events for token in e.token_ids]
    rows = []
    for e in events:
        if e.logprobs is not None:
            ids, values, rank = e.logprobs.arrays()
            assert len(ids) == len(e.token_ids) == len(rank)
            rows += [
                (e.logprobs.width, int(i), float(v)) for i, v in zip(ids[:, 0], values[:, 0], strict=True)
            ]
    prompt = [int(i) for e in events if e.prompt_logprobs for i in e.prompt_logprobs.arrays()[2]]
    return tokens, rows, prompt


@given(st.lists(event, max_size=20))
def test_merging_keeps_every_token_and_logprob(events: list[TokenEvent]) -> None:
    assert flat(merge(list(events))) == flat(events)


@given(st.lists(event, min_size=1, max_size=20))
def test_merging_keeps_the_counts(events: list[TokenEvent]) -> None:
    """The cached prompt tokens of the first admission; drafts accepted and rejected in all."""
    merged = merge(list(events))
    assert max(e.num_cached for e in merged) == max(e.num_cached for e in events)
    assert sum(e.accepted for e in merged) == sum(e.accepted for e in events)
    assert sum(e.rejected for e in merged) == sum(e.rejected for e in events)


def test_merging_keeps_why_a_prompt_was_not_cached() -> None:
    miss = CacheMiss(reason="new", position=3)
    first = TokenEvent(sequence=1, token_ids=(5,), num_cached=3, cache_miss=miss)
    (made,) = merge([first, TokenEvent(sequence=1, token_ids=(6,), finish="length")])
    assert (made.token_ids, made.finish, made.cache_miss) == ((5, 6), "length", miss)


@pytest.mark.requirement("F46")
def test_a_slow_reader_costs_one_event() -> None:
    async def run() -> None:
        seen: list[TokenEvent] = []
        flow = Flow([1], seen.append)
        for token in range(10 * MERGE_AT):
            flow.push([TokenEvent(sequence=1, token_ids=(token,))])
        assert len(flow._waiting[1]) < MERGE_AT
        flow.push([TokenEvent(sequence=1, finish="length")])
        taken = await flow.next()
        assert [t for e in taken for t in e.token_ids] == list(range(10 * MERGE_AT))
        assert taken[-1].finish == "length"
        assert len(seen) == 10 * MERGE_AT + 1

    asyncio.run(run())


def test_a_failed_flow_gives_its_events_and_then_the_first_error() -> None:
    async def run() -> None:
        flow = Flow([1])
        reader = asyncio.create_task(flow.next())
        await asyncio.sleep(0)
        flow.push([TokenEvent(sequence=1, token_ids=(1,))])
        flow.fail(Cancelled("left"))
        flow.fail(EngineDead("dead"))
        assert [event.token_ids for event in await asyncio.wait_for(reader, 1)] == [(1,)]
        for _ in range(2):
            with pytest.raises(Cancelled):
                await asyncio.wait_for(flow.next(), 1)

    asyncio.run(run())


def test_the_taker_gets_events_until_the_reader_is_woken() -> None:
    """The order of tokens must not depend on who takes the events."""

    async def run() -> None:
        flow, taken = Flow([1]), list[int]()

        def take(events: list[TokenEvent]) -> bool:
            taken.extend(token for event in events for token in event.token_ids)
            return len(taken) < 3

        def push(*tokens: int) -> None:
            flow.push([TokenEvent(sequence=1, token_ids=(token,)) for token in tokens])

        push(0)  # nobody waits yet
        assert [event.token_ids for event in await flow.next(take)] == [(0,)]
        reader = asyncio.create_task(flow.next(take))
        await asyncio.sleep(0)
        push(1)
        await asyncio.sleep(0)
        assert (taken, reader.done()) == ([1], False)
        push(2, 3)  # the taker wakes the reader; later events must wait for the reader
        push(4)
        assert [event.token_ids for event in await asyncio.wait_for(reader, 1)] == [(4,)]
        assert taken == [1, 2, 3]
        push(5)  # the reader has gone on
        assert (taken, [event.token_ids for event in await flow.next()]) == ([1, 2, 3], [(5,)])

    asyncio.run(run())
