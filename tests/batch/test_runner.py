"""The runner of batches with a slow store and with lines that cannot be read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from weft.batch.book import BatchBook, EndReason, OpenBatch
from weft.batch.lines import BatchAnswer
from weft.batch.runner import BatchRunner, LineBroken, LineOutput, LineRequest
from weft.front.batches.inner import ask


class SlowStore:
    """Store with slow requests. Line 3 cannot be read."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.written: dict[int, int] = {}
        self.ended: EndReason | None = None

    async def request(self, batch: str, line: int) -> LineRequest:
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.02)
        self.open -= 1
        if line == 3:
            raise LineBroken(BatchAnswer(400, "", b"{}"))
        return LineRequest(batch, line, "/", b"", sequences=2)

    async def record(self, outputs: list[LineOutput]) -> None:
        for output in outputs:
            assert output.line not in self.written
            self.written[output.line] = output.answer.status

    async def finalize(self, batch: str, reason: EndReason) -> None:
        self.ended = reason


def test_a_slow_store_gets_no_more_lines_than_the_capacity() -> None:
    async def run() -> None:
        store = SlowStore()

        async def send(request: LineRequest) -> BatchAnswer:
            return BatchAnswer(200, "r", b"{}")

        runner = BatchRunner(BatchBook(), store, send, lambda model, mine: 4 - mine)
        runner.feed(OpenBatch(batch="b", lines=tuple(range(20))))
        async with asyncio.timeout(20):
            await runner.run(lambda: runner.idle)
        assert store.most <= 4
        assert store.ended == "completed"
        assert store.written == dict.fromkeys(range(20), 200) | {3: 400}
        assert runner.sequences.total() == 0

    asyncio.run(run())


def test_a_line_that_stops_before_its_first_step_runs_again() -> None:
    async def run() -> None:
        store, stops = SlowStore(), 0

        def room(model: str, mine: int) -> int:
            # The model drains in the same turn of the event loop in which its lines start.
            nonlocal stops
            if stops < 1:
                stops += 1
                asyncio.get_running_loop().call_soon(runner.stop_lines, model)
            return 4 - mine

        async def send(request: LineRequest) -> BatchAnswer:
            return BatchAnswer(200, "r", b"{}")

        runner = BatchRunner(BatchBook(), store, send, room)
        runner.feed(OpenBatch(batch="b", lines=(0, 1)))
        async with asyncio.timeout(20):
            await runner.run(lambda: runner.idle)
        assert (stops, store.ended, store.written) == (1, "completed", {0: 200, 1: 200})
        assert runner.sequences.total() == 0

    asyncio.run(run())


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_that_was_cut_off_is_no_answer(whole: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"a":', "more_body": True})
        if whole:
            await send({"type": "http.response.body", "body": b"1}"})

    answer: Any = asyncio.run(ask(app, "/v1/completions", b"{}", 0, 1))
    assert (answer.status, answer.body == b'{"a":1}') == ((200, True) if whole else (500, False))
