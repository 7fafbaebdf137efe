"""Tools and tool choice in chat requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.common.errors import InvalidRequest
from weft.front.protocol.chat_request import ChatRequest
from weft.front.protocol.parse import parse
from weft.front.protocol.tools import MAX_TOOLS, ToolUse
from weft.text.parsing.parser import Tool

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def read(**fields: Any) -> ToolUse:
    return parse(json.dumps({**BODY, **fields}).encode(), ChatRequest).tool_use()


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def names(tools: tuple[Tool, ...]) -> list[str]:
    return [one.name for one in tools]


def test_tools_as_a_request_describes_them() -> None:
    use = read(tools=[tool(description="d", parameters=SCHEMA, strict=True), tool("g", parameters=None)])
    assert use.tools == (
        Tool(name="f", description="d", parameters=SCHEMA, strict=True),
        Tool(name="g"),
    )
    assert (use.mode, use.parallel) == ("auto", True)
    assert names(use.shown) == names(use.callable) == ["f", "g"]
    assert read() == ToolUse()


def test_every_choice() -> None:
    both = [tool("f"), tool("g")]
    none = read(tools=both, tool_choice="none")
    assert none.shown == none.callable == ()
    assert read(tools=both, tool_choice="required").mode == "required"
    one = read(tools=both, tool_choice=named("g"))
    assert (one.mode, names(one.shown), names(one.callable), one.parallel) == (
        "required",
        ["f", "g"],
        ["g"],
        False,
    )
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("f")]}}
    use = read(tools=both, tool_choice=some)
    assert (use.mode, names(use.shown), names(use.callable), use.parallel) == (
        "auto",
        ["f", "g"],
        ["f"],
        True,
    )
    assert not read(tools=both, parallel_tool_calls=False).parallel


@pytest.mark.requirement("F17")
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": [tool("")]}),
        ("tools", {"tools": [tool("a b")]}),
        ("tools", {"tools": [tool("x" * 129)]}),
        ("tools", {"tools": [tool(), tool()]}),
        ("tools", {"tools": [tool(str(n)) for n in range(MAX_TOOLS + 1)]}),
        ("tools", {"tools": [tool(parameters={"type": "string"})]}),
        ("tools", {"tools": [tool(parameters=[])]}),
        ("tools", {"tools": [tool(parameters={"properties": []})]}),
        ("tools", {"tools": [tool(parameters={"properties": {"a": 5}})]}),
        ("tools", {"tools": [tool(parameters={"properties": {"a": {"type": "int"}}})]}),
        ("tools", {"tools": [tool(parameters={"properties": {"a": {"type": 5}}})]}),
        ("tools", {"tools": [tool(parameters={"required": "a"})]}),
        ("tools", {"tools": [tool(parameters={"properties": {"a": {"items": [5]}}})]}),
        ("tools", {"tools": [tool(strict="yes")]}),
        ("tools", {"tools": [tool(unknown=1)]}),
        ("tools", {"tools": [{"type": "retrieval"}]}),
        ("tools", {"tools": [{"function": {"name": "f"}}]}),
        ("tools", {"tools": {}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": named("f")}),
        ("tool_choice", {"tools": [tool()], "tool_choice": named("absent")}),
        ("tool_choice", {"tools": [tool()], "tool_choice": "always"}),
        ("tool_choice", {"tools": [tool()], "tool_choice": {"type": "function"}}),
        (
            "tool_choice",
            {
                "tools": [tool()],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            },
        ),
        ("parallel_tool_calls", {"tools": [tool()], "parallel_tool_calls": 1}),
    ],
)
def test_what_cannot_be_is_named(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.requirement("F17")
def test_schemas_are_bounded() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(InvalidRequest, match="nested"):
        read(tools=[tool(parameters=deep)])
