"""``AsyncLLM`` on a real engine: streams, cancellation, aborts, and the death of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft import LLM, AsyncLLM, RequestOutput, SamplingParams
from weft.api import async_llm
from weft.common.errors import EngineDead, InvalidRequest, Overloaded
from weft.engine.core import EngineCore

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
"""Runs longer than a test, even on a slow machine."""


def go(settings: dict[str, Any], work: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **more: Any) -> None:
    """Run ``work`` with an engine within a deadline. Assert that no request remains in the engine."""

    async def whole() -> None:
        engine = AsyncLLM(**{**settings, "max_model_len": 2048, **more})
        try:
            await asyncio.wait_for(work(engine), deadline(60))
        finally:
            await asyncio.to_thread(engine.shutdown)
        assert engine._requests == {}
        assert engine._maker.ids._live == set()

    asyncio.run(whole())


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def idle(engine: AsyncLLM) -> None:
    """Wait until the engine is idle. Fail after the deadline."""
    until = time.monotonic() + deadline(5)
    while True:
        stats = await engine.stats()
        if (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0):
            return
        assert time.monotonic() < until, stats
        await asyncio.sleep(0.01)


def test_streams_are_cumulative_and_equal_llm(settings: dict[str, Any]) -> None:
    prompts: list[Any] = ["Tom has 3 pens.", "Ann buys", {"prompt_token_ids": [40, 50]}]
    with LLM(**settings) as llm:
        expected = [output.outputs for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        chat = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)[0]

    async def work(engine: AsyncLLM) -> None:
        streams = await asyncio.gather(*(collect(engine.generate(prompt, GREEDY)) for prompt in prompts))
        for stream, outputs in zip(streams, expected, strict=True):
            assert stream[-1].outputs == outputs
            assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]
            for before, after in itertools.pairwise(stream):
                assert after.outputs[0].text.startswith(before.outputs[0].text)
                assert len(after.outputs[0].token_ids) > len(before.outputs[0].token_ids)
        made = await collect(engine.generate({"messages": [{"role": "user", "content": "hi"}]}, GREEDY))
        assert made[-1].outputs == chat.outputs
        await idle(engine)

    go(settings, work)


def test_choices_stream_side_by_side(settings: dict[str, Any]) -> None:
    async def work(engine: AsyncLLM) -> None:
        params = SamplingParams(n=3, seed=4, max_tokens=8, ignore_eos=True, stop=["\u2603"])
        made = await collect(engine.generate("Tom", params, request_id="mine"))
        assert made[-1].request_id == "mine"
        assert [len(output.token_ids) for output in made[-1].outputs] == [8, 8, 8]
        assert len({tuple(output.token_ids) for output in made[-1].outputs}) == 3

    go(settings, work)


def test_leaving_the_iterator_frees_the_engine(settings: dict[str, Any]) -> None:
    async def work(engine: AsyncLLM) -> None:
        stream = engine.generate("Tom", LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await idle(engine)
        task = asyncio.create_task(collect(engine.generate("Ann", LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await idle(engine)
        assert (await collect(engine.generate("Tom", GREEDY)))[-1].finished

    go(settings, work)


def test_abort_ends_the_stream(settings: dict[str, Any]) -> None:
    async def work(engine: AsyncLLM) -> None:
        seen: list[RequestOutput] = []
        async for output in engine.generate("Tom", LONG, request_id="r"):
            seen.append(output)
            if len(seen) == 2:
                assert await engine.abort("r")
        assert seen[-1].finished
        assert seen[-1].outputs[0].finish_reason == "abort"
        assert not await engine.abort("r")
        await idle(engine)

    go(settings, work)


def test_refusals_are_raised(settings: dict[str, Any]) -> None:
    async def work(engine: AsyncLLM) -> None:
        for bad in ("", {"prompt_token_ids": [-1]}, {"messages": []}, {"messages": [], "other": 1}):
            with pytest.raises(InvalidRequest):
                await collect(engine.generate(bad, GREEDY))
        stream = engine.generate("Tom", LONG, request_id="r")
        await anext(stream)
        with pytest.raises(InvalidRequest, match="request_id"):
            await collect(engine.generate("Tom", GREEDY, request_id="r"))
        assert len(engine._requests) == 1, "the first sequence stays"
        await stream.aclose()  # type: ignore[attr-defined]
        await idle(engine)

    go(settings, work)


def test_a_full_queue_refuses_and_goes_on(settings: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def work(engine: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(engine.generate("Tom", params))) for _ in range(12)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if isinstance(result, Overloaded)]
        served = [result for result in results if isinstance(result, list)]
        assert refused
        assert served
        assert len(refused) + len(served) == 12
        assert all(len(stream[-1].outputs[0].token_ids) == 200 for stream in served)
        await idle(engine)

    go(settings, work, max_queued_requests=2, max_num_seqs=1)


def test_a_dying_engine_notifies_all_api_servers(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, broken = EngineCore.step, asyncio.Event()

    def failing(core: EngineCore) -> Any:
        if broken.is_set():
            raise RuntimeError("device lost")
        return step(core)

    monkeypatch.setattr(EngineCore, "step", failing)

    async def work(engine: AsyncLLM) -> None:
        streams = [engine.generate("Tom", LONG) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        broken.set()
        for stream in streams:
            with pytest.raises(EngineDead, match="RuntimeError"):
                await collect(stream)
        with pytest.raises(EngineDead):
            await collect(engine.generate("Tom", GREEDY))
        with pytest.raises(EngineDead):
            await engine.stats()

    go(settings, work)


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_comes_with_a_token_is_kept(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The reader is cancelled ``turns`` loop turns after a token; the cancellation must never be lost."""
    usual = async_llm._on_loop

    async def work(engine: AsyncLLM) -> None:
        reader = asyncio.create_task(collect(engine.generate("Tom", LONG)))
        loop = asyncio.get_running_loop()

        def later(count: int) -> None:
            if count:
                loop.call_soon(later, count - 1)
            else:
                reader.cancel()

        def cancelling(put: Callable[[Any], None]) -> Callable[[Any], None]:
            def put_and_cancel(item: Any) -> None:
                put(item)
                later(turns)

            return usual(put_and_cancel)

        with monkeypatch.context() as patch:
            patch.setattr(async_llm, "_on_loop", cancelling)
            await asyncio.wait([reader])
        assert reader.cancelled()
        await idle(engine)

    go(settings, work)


def test_shutdown_ends_what_runs(settings: dict[str, Any]) -> None:
    async def work(engine: AsyncLLM) -> None:
        stream = engine.generate("Tom", LONG)
        await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDead, match="shut down"):
            await collect(stream)

    go(settings, work)


@pytest.mark.slow
def test_a_hanging_engine_counts_as_dead(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hang = deadline(2.0)
    monkeypatch.setattr(EngineCore, "step", lambda core: time.sleep(hang) or [])

    async def work(engine: AsyncLLM) -> None:
        began = time.monotonic()
        with pytest.raises(EngineDead, match="no progress"):
            await collect(engine.generate("Tom", GREEDY))
        assert time.monotonic() - began < hang
        with pytest.raises(EngineDead, match="no progress"):
            await collect(engine.generate("Tom", GREEDY))

    go(settings, work, engine_timeout=0.3)


def test_random_cancels_leave_nothing(settings: dict[str, Any]) -> None:
    async def one(engine: AsyncLLM, number: int) -> str:
        stream = engine.generate(
            f"{number} pens", SamplingParams(n=1 + number % 3, max_tokens=30, seed=number)
        )
        count = 0
        async for output in stream:
            count += 1
            if number % 4 == 1 and count == 1 + number % 5:
                await stream.aclose()  # type: ignore[attr-defined]
                return "left"
            if number % 4 == 2 and count == 1 + number % 5:
                await engine.abort(output.request_id)
        return "ended" if output.finished else "lost"

    async def work(engine: AsyncLLM) -> None:
        results = await asyncio.gather(*(one(engine, number) for number in range(40)))
        assert set(results) <= {"left", "ended"}
        # tokens that arrive together are one output, so others may have ended
        assert results.count("left") >= 2
        await idle(engine)

    go(settings, work)
