"""Comments in streams in which nothing else is sent for long, and clients that skip them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from typing import Any

import openai
import pytest

from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.bench.records import RequestRecord, read_stream

COMMENT = ": keep-alive"
OFTEN = {"weft.front.http.streaming.KEEP_ALIVE": 0.1}
"""Ten times in each second that the fake head pauses for."""


@pytest.fixture(scope="module")
def server(start_fake: Any) -> Any:
    return start_fake(constants=OFTEN)


@mostly_slow("route", ["/v1/completions", "/v1/chat/completions"], 1)
def test_comments_before_and_between_tokens(server: Any, script: Any, sse: Any, route: str) -> None:
    fields = {"prompt": "abcdef"} if "chat" not in route else {}
    with server.stream(route, seed=script.SLOW, max_tokens=6, **fields) as answer:
        assert answer.status_code == 200
        lines = list(answer.iter_lines())
    assert {line for line in lines if not line.startswith("data: ")} == {"", COMMENT}
    assert lines.count("data: [DONE]") == 1
    first = next(number for number, line in enumerate(lines) if line.startswith("data: "))
    assert lines[:first].count(COMMENT) >= 2
    assert lines[first:].count(COMMENT) >= 2
    ends = [c["finish_reason"] for e in sse(iter(lines)) if e != "[DONE]" for c in e["choices"]]
    assert ends[-1] == "length"


def test_no_comment_while_events_come(start_fake: Any) -> None:
    server = start_fake(constants={"weft.front.http.streaming.KEEP_ALIVE": deadline(0.4)})
    with server.stream(max_tokens=400) as answer:
        assert COMMENT not in answer.iter_lines()


def test_refusals_still_have_their_status(server: Any, script: Any) -> None:
    with server.stream(seed=script.REJECT) as answer:
        assert answer.status_code == 429


@pytest.mark.slow
def test_what_fails_after_the_first_comment_is_an_event(start_fake: Any, script: Any, sse: Any) -> None:
    server = start_fake(constants=OFTEN, request_timeout=deadline(1.0))
    with server.stream(seed=script.HANG) as answer:
        assert answer.status_code == 200
        lines = list(answer.iter_lines())
    (failure,) = sse(iter(lines))
    assert failure["error"]["code"] == "deadline_exceeded"
    assert lines.count(COMMENT) >= 5


def test_a_client_that_leaves_during_the_comments(server: Any, script: Any) -> None:
    with server.stream(seed=script.HANG) as answer:
        lines = answer.iter_lines()  # kept: when it goes, httpx closes the connection
        assert next(lines) == COMMENT
        server.wait(lambda: server.metric("front_sequences") == 1, 3)  # a comment may precede the Submit
    server.wait(lambda: server.metric("front_sequences") == 0, 3)


@pytest.mark.slow
def test_clients_skip_comments(server: Any, script: Any) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": "abcdef", "max_tokens": 6, "seed": script.SLOW}

    def one_by_one() -> str:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            chunks = client.completions.create(**asked, stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(**asked, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(one_by_one), pool.submit(lambda: asyncio.run(ask()))]
        # Tokens that come together are one event, so the server's own count is asked for.
        with server.stream("/v1/completions", stream_options={"include_usage": True}, **asked) as answer:
            lines = [(time.monotonic(), line.encode()) for line in answer.iter_lines()]
        assert [one.result() for one in texts] == ["abcdef"] * 2
    record = RequestRecord(number=0, planned=None, sent=lines[0][0])
    read_stream(record, lines)
    assert (record.outcome, record.output_tokens) == ("ok", 6)
