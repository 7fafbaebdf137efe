"""anthropic-python: messages, streams, tools, reasoning, counting, retries."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import MODEL, Play
from tests.clients.outputs import WEATHER_SCHEMA, entries
from tests.support.servers import Running
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline

TOOL: Any = {"name": "get_weather", "description": "Weather of a city.", "input_schema": WEATHER_SCHEMA}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def client_of(server: Running, **more: Any) -> anthropic.Anthropic:
    settings = {"max_retries": 0, "timeout": deadline(30), **more}
    return anthropic.Anthropic(base_url=server.url, api_key="none", **settings)


@pytest.fixture(scope="module")
def server(play: Play) -> Running:
    return play(entries())


@pytest.fixture
def client(server: Running) -> anthropic.Anthropic:
    return client_of(server)


def test_a_message(client: anthropic.Anthropic) -> None:
    got = client.messages.create(
        model=MODEL,
        max_tokens=100,
        system="Be brief.",
        messages=user("count to five"),
        extra_body={"temperature": 0.5},
    )
    assert [block.type for block in got.content] == ["text"]
    assert got.content[0].text == "1 2 3 4 5"
    assert (got.role, got.type, got.stop_reason) == ("assistant", "message", "end_turn")
    assert got.usage.cache_read_input_tokens == 16
    assert got.usage.output_tokens == 10
    short = client.messages.create(model=MODEL, max_tokens=3, messages=user("count"))
    assert (short.stop_reason, short.content[0].text) == ("max_tokens", "1 2")
    ended = client.messages.create(model=MODEL, max_tokens=100, messages=user("count"), stop_sequences=["4"])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "4")


@pytest.mark.requirement("F67")
def test_the_stream_helper(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=user("count")) as stream:
        assert "".join(stream.text_stream) == "1 2 3 4 5"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 10


def test_events_come_in_their_order(client: anthropic.Anthropic) -> None:
    events = list(
        client.messages.create(model=MODEL, max_tokens=100, messages=user("think of 2 + 2"), stream=True)
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.content_block.type for event in starts] == ["thinking", "text"]
    assert [event.index for event in starts] == [0, 1]
    open_blocks: list[int] = []
    for event in events:
        if event.type == "content_block_start":
            assert open_blocks == []
            open_blocks.append(event.index)
        elif event.type == "content_block_delta":
            assert open_blocks == [event.index]
        elif event.type == "content_block_stop":
            assert open_blocks.pop() == event.index


def test_a_tools_round_trip(client: anthropic.Anthropic) -> None:
    messages = user("What is the weather in Paris?")
    first = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
    assert second.content[0].text == "It is 21 degrees."
    assert second.stop_reason == "end_turn"


def test_streamed_calls(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=300, messages=user("weather of two cities"), tools=[TOOL]
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert pieces
    calls = [block for block in final.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Oslo"}, {"city": "Bergen"}]
    assert len({call.id for call in calls}) == 2
    assert final.content[0].text.strip() == "I look."
    assert final.stop_reason == "tool_use"


def test_reasoning_can_be_sent_back(client: anthropic.Anthropic) -> None:
    messages = user("think of 2 + 2")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    got = client.messages.create(model=MODEL, max_tokens=2000, messages=messages, thinking=thinking)
    assert [block.type for block in got.content] == ["thinking", "text"]
    assert got.content[0].thinking.strip() == "Two and two."
    messages += [{"role": "assistant", "content": got.content}, *user("count")]
    again = client.messages.create(model=MODEL, max_tokens=2000, messages=messages, thinking=thinking)
    assert again.content[-1].text in ("Four.", "1 2 3 4 5")


@pytest.mark.requirement("G10")
def test_counting_is_what_a_message_uses(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"system": "Be brief.", "messages": user("count to five"), "tools": [TOOL]}
    count = client.messages.count_tokens(model=MODEL, **asked)
    used = client.messages.create(model=MODEL, max_tokens=50, **asked).usage
    read, made = used.cache_read_input_tokens or 0, used.cache_creation_input_tokens or 0
    assert count.input_tokens == used.input_tokens + read + made


def test_models_have_the_fields_of_the_api(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, MODEL)
    (listed,) = page.data
    for model in (listed, client.models.retrieve(MODEL)):
        # Strict: the client itself accepts answers without required fields.
        read = anthropic.types.ModelInfo.model_validate_json(model.to_json(), strict=True)
        assert (read.id, read.display_name, read.type) == (MODEL, MODEL, "model")
        assert read.created_at.timestamp() == model.created  # type: ignore[attr-defined]


def test_the_asynchronous_client(server: Running) -> None:
    async def talk() -> list[str]:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="none", timeout=deadline(30)
        ) as client:

            async def one() -> str:
                async with client.messages.stream(
                    model=MODEL, max_tokens=100, messages=user("count")
                ) as stream:
                    return await stream.get_final_text()

            return await asyncio.gather(*[one() for _ in range(8)])

    assert asyncio.run(talk()) == ["1 2 3 4 5"] * 8


@mostly_slow("error", ["overloaded", "unavailable"], ["overloaded"])
def test_a_client_tries_again(play: Play, error: str) -> None:
    client = client_of(play([{"error": error}, {"text": "now"}]), max_retries=1)
    assert client.messages.create(model=MODEL, max_tokens=9, messages=user("x")).content[0].text == "now"


def test_mistakes_are_the_clients_own_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, max_tokens=0, messages=user("x"))
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nope", max_tokens=9, messages=user("x"))


def test_a_failure_inside_a_stream_is_raised(play: Play) -> None:
    client = client_of(play([{"text": "abc", "delay_ms": 20, "finish": "error"}]))
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model=MODEL, max_tokens=9, messages=user("x")) as stream,
    ):
        list(stream)


def test_a_real_model_answers(bundled: Running) -> None:
    got = client_of(bundled).messages.create(
        model=bundled.model,
        max_tokens=64,
        extra_body={"temperature": 0},
        messages=user("Tom has 12 apples and buys 7 more. How many apples does he have?"),
    )
    assert "19" in got.content[0].text
