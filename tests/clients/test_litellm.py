"""LiteLLM: OpenAI's and Anthropic's providers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import MODEL, Play
from tests.clients.outputs import WEATHER, entries
from tests.support.servers import Running
from tests.support.slowness import deadline

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server(play: Play) -> Running:
    return play(entries())


@pytest.fixture
def complete(server: Running, monkeypatch: pytest.MonkeyPatch, provider: str) -> Any:
    """``litellm.completion`` at the server. Nothing is fetched from elsewhere."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="litellm is not installed: make test-clients")
    litellm.telemetry = False
    base = server.url + ("/v1" if provider == "openai" else "")

    def run(text: str, messages: Any = None, **more: Any) -> Any:
        return litellm.completion(
            model=f"{provider}/{MODEL}",
            messages=messages or [{"role": "user", "content": text}],
            api_base=base,
            api_key="none",
            max_tokens=200,
            timeout=deadline(30),
            num_retries=0,
            **more,
        )

    return run


@pytest.fixture(params=["openai", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_completion(complete: Any) -> None:
    got = complete("count to five")
    assert got.choices[0].message.content == "1 2 3 4 5"
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.prompt_tokens_details.cached_tokens == 16


def test_a_stream(complete: Any) -> None:
    chunks = list(complete("count to five", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "1 2 3 4 5"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_reasoning(complete: Any) -> None:
    message = complete("think of 2 + 2").choices[0].message
    assert message.content == "Four."
    assert message.reasoning_content.strip() == "Two and two."


@pytest.mark.requirement("F67")
@pytest.mark.parametrize("stream", [False, True])
def test_a_tools_round_trip(complete: Any, stream: bool) -> None:
    import litellm

    messages: list[Any] = [{"role": "user", "content": "weather in Paris?"}]
    first = complete("", messages, tools=[WEATHER], stream=stream)
    if stream:
        first = litellm.stream_chunk_builder(list(first), messages=messages)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    second = complete("", messages, tools=[WEATHER])
    assert second.choices[0].message.content == "It is 21 degrees."


def test_a_mistake_is_its_own_exception(complete: Any) -> None:
    import litellm

    with pytest.raises(litellm.BadRequestError):
        complete("x", temperature=-1)
