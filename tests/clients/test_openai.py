"""openai-python: chat, tools, parsed answers, the Responses API, retries."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.conftest import MODEL, Play
from tests.clients.outputs import WEATHER, WEATHER_SCHEMA, entries
from tests.support.servers import Running, Servers
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline


class Person(pydantic.BaseModel):
    name: str
    age: int


class get_weather(pydantic.BaseModel):
    city: str


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server(play: Play) -> Running:
    return play(entries())


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


def client_of(server: Running, **more: Any) -> openai.OpenAI:
    settings = {"max_retries": 0, "timeout": deadline(30), **more}
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", **settings)


def test_chat(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(model=MODEL, messages=user("count to five"))
    assert got.choices[0].message.content == "1 2 3 4 5"
    assert got.choices[0].finish_reason == "stop"
    assert got.usage is not None
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 16
    assert [model.id for model in client.models.list()] == [MODEL]


def test_reasoning_are_apart(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model=MODEL, messages=user("think of 2 + 2")).choices[0].message
    assert message.content == "Four."
    assert message.reasoning_content.strip() == "Two and two."  # type: ignore[attr-defined]
    stream = client.chat.completions.create(model=MODEL, messages=user("think of 2 + 2"), stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert (
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == "Two and two."
    )
    assert "".join(delta.content or "" for delta in deltas) == "Four."


def test_usage_counts_reasoning_in_each_api(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": user("think of 2 + 2")}
    whole = client.chat.completions.create(**asked).usage
    several = client.chat.completions.create(n=2, **asked).usage
    hidden = client.chat.completions.create(extra_body={"include_reasoning": False}, **asked).usage
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *_, last = stream
    response = client.responses.create(model=MODEL, input="think of 2 + 2").usage
    assert response is not None
    count = response.output_tokens_details.reasoning_tokens
    assert count > 5

    def counted(usage: Any) -> int:
        return int(usage.completion_tokens_details.reasoning_tokens)

    assert (counted(whole), counted(hidden), counted(last.usage), counted(several)) == (
        *[count] * 3,
        2 * count,
    )
    plain = client.chat.completions.create(model=MODEL, messages=user("count to five")).usage
    assert plain is not None
    assert plain.completion_tokens_details is None


@pytest.mark.requirement("F67")
def test_the_asynchronous_client(server: Running) -> None:
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=deadline(30)
        ) as client:

            async def one(stream: bool) -> str:
                got = await client.chat.completions.create(model=MODEL, messages=user("count"), stream=stream)
                if not stream:
                    return got.choices[0].message.content
                return "".join([chunk.choices[0].delta.content or "" async for chunk in got])

            return await asyncio.gather(*[one(stream) for stream in (False, True) * 8])

    assert asyncio.run(talk()) == ["1 2 3 4 5"] * 16


def test_a_tools_round_trip(client: openai.OpenAI) -> None:
    messages = user("What is the weather in Paris?")
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.content in (None, "")
    (call,) = message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "It is 21 degrees."
    assert second.choices[0].finish_reason == "stop"


def test_two_calls_stream_side_by_side(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=user("weather of two cities"), tools=[WEATHER], stream=True
    )
    found: dict[int, dict[str, str]] = {}
    text, reasons = "", []
    for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for part in choice.delta.tool_calls or []:
            assert part.function is not None
            if part.index not in found:
                assert part.id
                assert part.type == "function"
                found[part.index] = {"id": part.id, "name": part.function.name or "", "arguments": ""}
            found[part.index]["arguments"] += part.function.arguments or ""
    assert [json.loads(one["arguments"])["city"] for one in found.values()] == ["Oslo", "Bergen"]
    assert found[0]["id"] != found[1]["id"]
    assert text.strip() == "I look."
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


@pytest.mark.requirement("F67")
def test_the_stream_helper_collects_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user("weather?"), tools=[openai.pydantic_function_tool(get_weather)]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == get_weather(city="Paris")


def test_parsed_answers(client: openai.OpenAI) -> None:
    got = client.chat.completions.parse(model=MODEL, messages=user("as json"), response_format=Person)
    assert got.choices[0].message.parsed == Person(name="Ann", age=7)
    called = client.chat.completions.parse(
        model=MODEL, messages=user("weather?"), tools=[openai.pydantic_function_tool(get_weather)]
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == get_weather(city="Paris")


def test_responses(client: openai.OpenAI) -> None:
    got = client.responses.create(model=MODEL, input="count to five", instructions="Be brief.")
    assert got.output_text == "1 2 3 4 5"
    assert got.status == "completed"
    assert got.usage is not None
    assert got.usage.input_tokens_details.cached_tokens == 16
    reasoning = client.responses.create(model=MODEL, input="think of 2 + 2")
    assert [item.type for item in reasoning.output] == ["reasoning", "message"]
    assert reasoning.output_text == "Four."
    parsed = client.responses.parse(model=MODEL, input="as json", text_format=Person)
    assert parsed.output_parsed == Person(name="Ann", age=7)


def test_a_tools_round_trip_over_responses(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": True}
    first = client.responses.create(model=MODEL, input="weather in Paris?", tools=[tool])
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    second = client.responses.create(model=MODEL, input=[result], tools=[tool], previous_response_id=first.id)
    assert second.output_text == "It is 21 degrees."
    assert second.previous_response_id == first.id
    whole: Any = [{"role": "user", "content": "weather in Paris?"}, *first.output, result]
    again = client.responses.create(model=MODEL, input=whole, tools=[tool], store=False)
    assert again.output_text == "It is 21 degrees."
    assert client.responses.retrieve(first.id).id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_streamed_responses(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": True}
    with client.responses.stream(model=MODEL, input="weather?", tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    assert final.output[-1].type == "function_call"
    assert final.output[-1].parsed_arguments == {"city": "Paris"}
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    text = client.responses.create(model=MODEL, input="think of 2 + 2", stream=True)
    assert "".join(one.delta for one in text if one.type == "response.output_text.delta") == "Four."


@pytest.mark.requirement("F67")
@mostly_slow("error", ["overloaded", "unavailable"], ["overloaded"])
def test_a_client_tries_again_after_what_the_server_says(play: Play, error: str) -> None:
    client = client_of(play([{"error": error}, {"text": "now"}]), max_retries=1)
    began = time.monotonic()
    assert client.chat.completions.create(model=MODEL, messages=user("x")).choices[0].message.content == "now"
    assert time.monotonic() - began >= 0.9  # Retry-After is at least a second
    client = client_of(play([{"error": error, "repeat": True}]))
    with pytest.raises(openai.RateLimitError if error == "overloaded" else openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=user("x"))


def test_a_failure_inside_a_stream_is_raised(play: Play) -> None:
    client = client_of(play([{"text": "abc", "delay_ms": 20, "finish": "error"}]))
    stream = client.chat.completions.create(model=MODEL, messages=user("x"), stream=True)
    with pytest.raises(openai.APIError, match="the script ends this output with an error"):
        list(stream)


def test_a_closed_stream_is_cancelled(server: Running, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=user("slow"), stream=True)
    next(iter(stream))
    server.wait(lambda: server.metric("num_requests_running") == 1)
    stream.close()
    server.wait(lambda: server.metric("num_requests_running") == 0)


def test_mistakes_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=user("x"), temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=user("x"))


def test_json_of_a_real_model(bundled: Running) -> None:
    client = client_of(bundled)
    schema: Any = {
        "type": "object",
        "properties": {"unit": {"enum": ["kg", "m"]}, "right": {"type": "boolean"}},
        "required": ["unit", "right"],
        "additionalProperties": False,
    }
    got = client.chat.completions.create(
        model=bundled.model,
        messages=user("How long is it?"),
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    )
    answer = json.loads(got.choices[0].message.content or "")
    assert answer["unit"] in ("kg", "m")
    assert isinstance(answer["right"], bool)
    assert got.choices[0].finish_reason == "stop"


def test_grammars_hold_a_real_model(bundled: Running) -> None:
    client = client_of(bundled)
    got = client.chat.completions.create(
        model=bundled.model,
        messages=user("How long is it?"),
        max_tokens=64,
        extra_body={"guided_choice": ["12 metres", "one mile"]},
    )
    assert got.choices[0].message.content in ("12 metres", "one mile")
    assert got.choices[0].finish_reason == "stop"


def test_legacy_completions_of_a_real_model(bundled: Running) -> None:
    client = client_of(bundled)
    got = client.completions.create(
        model=bundled.model, prompt="Tom has 12 apples", max_tokens=4, echo=True, logprobs=2, temperature=0
    )
    assert got.choices[0].text.startswith("Tom has 12 apples")
    assert got.choices[0].logprobs is not None
    assert len(got.choices[0].logprobs.tokens or []) == len(got.choices[0].logprobs.token_logprobs or [])
    chunks = client.completions.create(model=bundled.model, prompt="Tom", max_tokens=4, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_a_batch(servers: Servers, tmp_path: Path) -> None:
    """Files and batches, from the upload to the text of the output."""
    running = servers.scripted(
        tmp_path, [{"text": "ready", "repeat": True}], "--batch-dir", str(tmp_path / "batches")
    )
    client = openai.OpenAI(base_url=running.url + "/v1", api_key="none")
    body = {"model": running.model, "messages": [{"role": "user", "content": "hello"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    assert client.files.wait_for_processing(file.id).status == "processed"
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    running.wait(lambda: client.batches.retrieve(made.id).status == "completed", 30)
    output = client.batches.retrieve(made.id).output_file_id
    assert output is not None
    answer = json.loads(client.files.content(output).text)["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == "ready"
