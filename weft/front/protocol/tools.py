"""Tools as written in OpenAI's chat API, with the choice of allowed and required tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from weft.front.protocol.tool_use import ToolUse
from weft.text.parsing.parser import Tool


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, an object."""
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    """No effect, like the field of the tool: every prompt is cached."""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function as a tool. No other kind of tool exists."""

    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None


class FunctionName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name of a tool."""

    name: str


class NamedFunction(
    msgspec.Struct, frozen=True, kw_only=True, tag="function", tag_field="type", forbid_unknown_fields=True
):
    """Choice of one tool, to be called."""

    function: FunctionName


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice among some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class AllowedChoice(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="allowed_tools",
    tag_field="type",
    forbid_unknown_fields=True,
):
    """Call some of the tools; with ``required``, at least one."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required", "any"] | NamedFunction | AllowedChoice


def tool_use(
    tools: Sequence[FunctionTool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse:
    """Return the tools and the choice of a chat request.

    Raises InvalidRequest for an invalid tool or choice.
    """
    made = tuple(map(_tool, tools or ()))
    several = parallel is not False
    if choice is None or isinstance(choice, str):
        mode = "required" if choice == "any" else choice or "auto"
        return ToolUse.checked(made, mode=mode, parallel=several)
    if isinstance(choice, NamedFunction):
        return ToolUse.checked(made, mode="required", names=[choice.function.name], parallel=False)
    allowed = choice.allowed_tools
    names = [tool.function.name for tool in allowed.tools]
    return ToolUse.checked(made, mode=allowed.mode, names=names, parallel=several)


def _tool(tool: FunctionTool) -> Tool:
    """Return the tool in common form."""
    function = tool.function
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {},
        strict=bool(function.strict),
    )
