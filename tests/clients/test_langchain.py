"""LangChain's ChatOpenAI: streams, tools, structured answers."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from tests.clients.conftest import MODEL, Play
from tests.clients.outputs import call, entries
from tests.support.servers import Running
from tests.support.slowness import deadline

pytestmark = pytest.mark.clients


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Weather of a city."""
    return "21 degrees"


@pytest.fixture(scope="module")
def server(play: Play) -> Running:
    person = {"match": "by a call", "text": call("Person", name="Ann", age=7), "repeat": True}
    return play(entries(person))


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(server: Running, request: pytest.FixtureRequest) -> Any:
    openai = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed: make test-clients"
    )
    return openai.ChatOpenAI(
        base_url=server.url + "/v1",
        model=MODEL,
        api_key="none",
        timeout=deadline(30),
        max_retries=0,
        use_responses_api=request.param,
    )


def test_invoke_and_stream(model: Any) -> None:
    got = model.invoke("count to five")
    assert got.text == "1 2 3 4 5"
    assert got.usage_metadata["input_token_details"]["cache_read"] == 16
    assert "".join(chunk.text for chunk in model.stream("count to five")) == "1 2 3 4 5"
    assert [one.text for one in model.batch(["count", "count"])] == ["1 2 3 4 5"] * 2


@pytest.mark.requirement("F67")
def test_a_tools_round_trip(model: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    tools = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("weather in Paris?")]
    first = tools.invoke(messages)
    (made,) = first.tool_calls
    assert (made["name"], made["args"]) == ("get_weather", {"city": "Paris"})
    messages += [first, ToolMessage(get_weather(**made["args"]), tool_call_id=made["id"])]
    assert tools.invoke(messages).text == "It is 21 degrees."
    whole = None
    for chunk in tools.stream("weather of two cities"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [one["args"]["city"] for one in whole.tool_calls] == ["Oslo", "Bergen"]


@pytest.mark.parametrize(
    ("method", "text"),
    [("json_schema", "as json"), ("function_calling", "by a call"), ("json_mode", "as json")],
)
def test_structured_answers(model: Any, method: str, text: str) -> None:
    assert model.with_structured_output(Person, method=method).invoke(text) == Person(name="Ann", age=7)
