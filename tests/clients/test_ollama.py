"""ollama-python: chat, generate, tools, reasoning, formats, embeddings, lists of models, errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
import pytest

from tests.clients.conftest import MODEL, Play
from tests.clients.outputs import WEATHER, entries
from tests.support.servers import Running
from tests.support.slowness import deadline


@pytest.fixture(scope="module")
def server(play: Play) -> Running:
    return play(entries())


@pytest.fixture
def client(server: Running) -> Any:
    return ollama.Client(host=server.url, timeout=deadline(30))


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat(client: Any) -> None:
    got = client.chat(model=MODEL, messages=user("count to five"), options={"temperature": 0.5})
    assert (got.message.role, got.message.content) == ("assistant", "1 2 3 4 5")
    assert (got.done, got.done_reason, got.eval_count) == (True, "stop", 10)
    assert got.total_duration >= got.eval_duration > 0
    assert client.chat(model=f"{MODEL}:latest", messages=user("count")).message.content == "1 2 3 4 5"
    cut = client.chat(model=MODEL, messages=user("count"), options={"num_predict": 3})
    # Ollama's server reads every number as a float, and some languages write whole floats.
    floats = {"num_predict": 3.0, "top_k": 1.0, "seed": 1.0}
    assert client.chat(model=MODEL, messages=user("count"), options=floats).message == cut.message
    assert (cut.message.content, cut.done_reason) == ("1 2", "length")


def test_a_stream(client: Any) -> None:
    lines = list(client.chat(model=MODEL, messages=user("count"), stream=True))
    assert "".join(line.message.content for line in lines) == "1 2 3 4 5"
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].prompt_eval_count > 0


def test_streaming_is_the_default(server: Running) -> None:
    body = {"model": MODEL, "messages": user("count")}
    answer = server.http.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "1 2 3 4 5"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart(client: Any, stream: bool) -> None:
    got = client.chat(model=MODEL, messages=user("think of 2 + 2"), stream=stream, think=True)
    lines = list(got) if stream else [got]
    assert "".join(line.message.thinking or "" for line in lines).strip() == "Two and two."
    assert "".join(line.message.content or "" for line in lines).strip() == "Four."


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_cannot_stop_thinking_thinks_unseen(client: Any, stream: bool) -> None:
    got = client.chat(model=MODEL, messages=user("think of 2 + 2"), stream=stream, think=False)
    lines = list(got) if stream else [got]
    assert not any(line.message.thinking for line in lines)
    assert "".join(line.message.content or "" for line in lines).strip() == "Four."
    assert lines[-1].eval_count > len("Four.")
    got = client.generate(model=MODEL, prompt="think of 2 + 2", stream=stream, think=False)
    lines = list(got) if stream else [got]
    assert not any(line.thinking for line in lines)
    assert "".join(line.response or "" for line in lines).strip() == "Four."


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(client: Any, stream: bool) -> None:
    messages: list[Any] = user("the weather in two cities")
    got = client.chat(model=MODEL, messages=messages, tools=[WEATHER], stream=stream)
    lines = list(got) if stream else [got]
    calls = [call for line in lines for call in line.message.tool_calls or []]
    assert [(call.function.name, dict(call.function.arguments)) for call in calls] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"city": "Bergen"}),
    ]
    assert lines[-1].done_reason == "stop"
    answer = {"role": "assistant", "content": "", "tool_calls": [call.model_dump() for call in calls]}
    results = [{"role": "tool", "tool_name": "get_weather", "content": text} for text in ("21", "4")]
    end = client.chat(model=MODEL, messages=[*messages, answer, *results], tools=[WEATHER])
    assert end.message.content == "It is 21 degrees."


def test_fields_of_other_apis_beside_the_options(server: Running) -> None:
    """Vercel's AI SDK sends these fields. Ollama drops them; here they have their meaning."""

    def chat(prompt: str, **fields: Any) -> Any:
        body = {"model": MODEL, "messages": user(prompt), "stream": False, **fields}
        answer = server.http.post("/api/chat", json=body)
        return answer.json() if answer.status_code == 200 else answer.json()["error"]

    cut = chat("count", max_output_tokens=3, temperature=0.5, top_p=0.5, stop=["zz"])
    assert (cut["eval_count"], cut["done_reason"]) == (3, "length")
    assert chat("count", max_tokens=3, options={"num_predict": 2})["eval_count"] == 2
    # A negative option means no limit, and wins, too.
    assert chat("count", max_tokens=3, options={"num_predict": -1})["message"]["content"] == "1 2 3 4 5"
    assert chat("count", max_tokens=3, options={"num_predict": None})["eval_count"] == 3
    assert chat("count", temperature=-1) == "temperature must be at least 0 and at most 100"
    assert chat("count", temperature=1, options={"temperature": -1}).startswith("options.temperature must")
    assert chat("count", max_output_tokens=-1).startswith("max_output_tokens must be between 1")
    assert chat("count", tool_choice="required") == "tool_choice needs tools"
    for choice in ("auto", "required", {"type": "function", "name": "get_weather"}):
        found = chat("weather", tools=[WEATHER], tool_choice=choice)
        assert found["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    other = {"type": "function", "name": "other"}
    assert "tool_choice must name" in chat("weather", tools=[WEATHER], tool_choice=other)
    body = {"model": MODEL, "prompt": "count", "max_tokens": 3, "stop": [], "stream": False}
    assert server.http.post("/api/generate", json=body).json()["eval_count"] == 3


def test_generate(client: Any) -> None:
    got = client.generate(model=MODEL, prompt="count", system="Be brief.")
    assert (got.response, got.done_reason) == ("1 2 3 4 5", "stop")
    raw = client.generate(model=MODEL, prompt="count", raw=True, stream=True)
    assert "".join(line.response for line in raw) == "1 2 3 4 5"


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"name": {"type": "string"}}}])
def test_a_format(client: Any, form: Any) -> None:
    got = client.chat(model=MODEL, messages=user("json"), format=form)
    assert json.loads(got.message.content)["name"] == "Ann"


def test_a_request_without_a_prompt_loads_the_model(client: Any) -> None:
    assert client.generate(model=MODEL).done_reason == "load"
    assert client.chat(model=MODEL, messages=[]).done_reason == "load"
    assert client.generate(model=MODEL, keep_alive=0).done_reason == "unload"


def test_models(client: Any) -> None:
    (listed,) = client.list().models
    assert listed.model == MODEL
    assert len(listed.digest) == 64
    (running,) = client.ps().models
    assert running.model == MODEL
    assert running.context_length == 1_000_000
    shown = client.show(MODEL)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert shown.modelinfo["general.architecture"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "other"}, "does not exist"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ({"options": {"num_predict": 2.5}}, "options.num_predict: expected int, got float"),
        ({"options": {"num_ctc": 2}}, "unknown option: options.num_ctc"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, "options.repeat_last_n must be -1"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"format": "xml"}, "format must be"),
        ({"messages": [{"role": "user"}], "tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_errors_name_the_field(server: Running, fields: dict[str, Any], says: str) -> None:
    body = {"model": MODEL, "messages": user("count"), **fields}
    answer = server.http.post("/api/chat", json=body)
    assert answer.status_code in (400, 404)
    assert says in answer.json()["error"]


def test_an_error_of_the_client(client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as raised:
        client.chat(model="other", messages=user("count"))
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="weft pull"):
        client.pull("other")


def test_embeddings(bundled: Running) -> None:
    client = ollama.Client(host=bundled.url, timeout=deadline(60))
    model = bundled.model
    got = client.embed(model=model, input=["Why is the sky blue?", "What is water?"])
    assert len(got.embeddings) == 2
    one = client.embeddings(model=model, prompt="Why is the sky blue?")
    assert list(one.embedding) == pytest.approx(list(got.embeddings[0]), abs=1e-6)
    assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("fields", [{}, {"raw": True}, {"stream": True}])
def test_logprobs(bundled: Running, fields: dict[str, Any]) -> None:
    client = ollama.Client(host=bundled.url, timeout=deadline(60))
    got = client.generate(
        model=bundled.model,
        prompt="Tom has 2 apples",
        options={"num_predict": 4},
        logprobs=True,
        top_logprobs=2,
        **fields,
    )
    lines = list(got) if "stream" in fields else [got]
    found = [one for line in lines for one in line.logprobs or []]
    assert len(found) == lines[-1].eval_count == 4
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in found)


def test_health(server: Running) -> None:
    assert httpx.get(f"{server.url}/api/version").json()["version"]
