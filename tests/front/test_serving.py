"""Parts of an answer that are made off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from weft.front.http.answers import Usage, make_usage
from weft.front.http.streaming import StreamForm
from weft.front.requests.serving import LONG_ANSWER, _events


class Generation:
    """A finished generation."""

    done = True

    def __init__(self, tokens: int) -> None:
        self.flow = self
        self._tokens = tokens

    def usage(self) -> Usage:
        return make_usage(prompt=1, completion=self._tokens - 1, cached=0)

    def succeeded(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise error

    def wake(self) -> None:
        pass


class Shape:
    """A shape that reports the thread of its end event."""

    form = StreamForm()

    def closing(self, usage: Usage) -> list[Any]:
        return [threading.current_thread() is threading.main_thread()]


class Front:
    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)


@pytest.mark.parametrize("tokens", [LONG_ANSWER, LONG_ANSWER + 1])
def test_the_end_of_a_long_stream_is_made_in_a_thread(tokens: int) -> None:
    """The end of a long stream repeats the whole answer and counts reasoning tokens, so a thread makes it."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def end() -> list[bytes]:
        front, generation, shape = cast(Any, Front()), cast(Any, Generation(tokens)), cast(Any, Shape())
        made = _events(front, receive, generation, shape, [], cast(Any, None))
        return [data async for data in made]

    on_loop = b"true" if tokens <= LONG_ANSWER else b"false"
    assert asyncio.run(end()) == [b"data: " + on_loop + b"\n\n", b"data: [DONE]\n\n"]
