"""Tools of the Responses API: functions, also in namespaces, and custom tools with plain text as input.

The model sees all tools as functions. A function in a namespace is ``NAMESPACE.NAME`` for the model. A tool
of type custom is a function with one argument, ``input``. Weft does not run tools on the server.
``web_search`` is dropped, because agents always send the tool, to any server. All other server-side tools
are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.enforceable_schemas import log_unenforced
from weft.front.protocol.parse import convert, printable
from weft.front.protocol.responses.protocol import (
    ChooseAllowed,
    ChooseCustom,
    ChooseFunction,
    ResponseToolChoice,
)
from weft.front.protocol.tools import ToolUse
from weft.grammar.regular import regular_pattern
from weft.text.parsing.parser import Tool

SEARCHES = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
MAX_GRAMMAR = 64 << 10
"""Maximum characters of a custom tool's grammar."""


class _Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class FunctionTool(_Tool, frozen=True, kw_only=True, rename={"asynchronous": "async"}):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    """Not shown to the model."""
    asynchronous: Literal[False] | None = None


class TextInput(msgspec.Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Any text."""


class GrammarInput(msgspec.Struct, frozen=True, kw_only=True, tag="grammar", tag_field="type"):
    """Text of a grammar: a context-free grammar in Lark's notation, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str

    @property
    def pattern(self) -> str | None:
        """The grammar as one regular expression; None if there is none."""
        if self.syntax == "regex":
            return f"^(?:{self.definition})$"
        return regular_pattern(self.definition)


class CustomTool(_Tool, frozen=True, kw_only=True, rename={"asynchronous": "async"}):
    type: Literal["custom"]
    format: TextInput | GrammarInput | None = None
    asynchronous: Literal[False] | None = None


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[dict[str, Any]]


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """Form of a tool call in the answer, for a tool with another name for the model."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """Tools of a request."""

    use: ToolUse
    names: dict[str, Named]
    """The model's name of a tool -> form of the call, for all tools except plain functions."""
    shown: list[dict[str, Any]]
    """Tools repeated in the answer: all tools shown to the model."""


def joined(namespace: str | None, name: str) -> str:
    """Return the model's name of a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def offered(
    tools: Sequence[dict[str, Any]] | None, choice: ResponseToolChoice | None, parallel: bool | None
) -> Offered:
    """Return the tools of a request, without tool search.

    Raises InvalidRequest for an unsupported tool or choice.
    """
    made: list[Tool] = []
    names: dict[str, Named] = {}
    shown: list[dict[str, Any]] = []
    for number, value in enumerate(tools or ()):
        where = f"tools[{number}]"
        if value.get("type") in SEARCHES:
            continue
        shown.append(value)
        for tool, named in _tools(value, where):
            made.append(tool)
            if named is not None:
                names[tool.name] = named
    return Offered(use=_chosen(made, choice, parallel is not False), names=names, shown=shown)


def _tools(value: dict[str, Any], where: str) -> Iterator[tuple[Tool, Named | None]]:
    """Yield the tools of one entry, each with its own name if the model sees another name (else None).

    Raises InvalidRequest.
    """
    if value.get("type") != "namespace":
        yield _tool(value, where, None)
        return
    space: Namespace = convert(where, value, Namespace)
    for number, inner in enumerate(space.tools):
        yield _tool(inner, f"{where}.tools[{number}]", space.name)


def _tool(value: dict[str, Any], where: str, namespace: str | None) -> tuple[Tool, Named | None]:
    """Return the tool, and its own name if the model sees another name (else None). Raises InvalidRequest."""
    tool_type = value.get("type")
    if tool_type == "function":
        tool: FunctionTool = convert(where, value, FunctionTool)
        made = Tool(
            name=joined(namespace, tool.name),
            description=tool.description or "",
            parameters=tool.parameters or {},
            strict=bool(tool.strict),
        )
        return made, None if namespace is None else Named(name=tool.name, namespace=namespace)
    if tool_type == "custom":
        custom: CustomTool = convert(where, value, CustomTool)
        name = joined(namespace, custom.name)
        return _custom(custom, name), Named(name=custom.name, namespace=namespace, custom=True)
    if not isinstance(tool_type, str):
        raise InvalidRequest(f"{where} must have a type: function, custom or namespace", param=where)
    raise InvalidRequest(
        f"{where}: tools of type {printable(tool_type, 40)} are not supported, because this server runs "
        "no tools; supported types: function, custom, and namespace with tools of these types",
        param=where,
        code="unsupported_parameter",
    )


def _custom(tool: CustomTool, name: str) -> Tool:
    """Return the function shown to the model.

    A grammar is appended to the description. A grammar that is a single regular expression is also enforced,
    if the model's form of calls allows enforcement; another grammar is logged. Raises InvalidRequest for a
    grammar that is too long.
    """
    about, form = tool.description or "", tool.format
    if not isinstance(form, GrammarInput):
        return Tool(name=name, description=about, parameters=_input())
    form_name = "grammar (Lark)" if form.syntax == "lark" else "regular expression"
    about = f"{about}\n\nThe input must match this {form_name}:\n{form.definition}".strip()
    if len(form.definition) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"tools: the grammar of {name} has more than {MAX_GRAMMAR} characters", param="tools"
        )
    if (pattern := form.pattern) is None:
        log_unenforced(f"tool {name}", "the grammar of its input")
        return Tool(name=name, description=about, parameters=_input())
    return Tool(name=name, description=about, parameters=_input(pattern), strict=True, yields=True)


def _input(pattern: str | None = None) -> dict[str, Any]:
    """Return the schema of a custom tool's single argument."""
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


def _chosen(tools: Sequence[Tool], choice: ResponseToolChoice | None, parallel: bool) -> ToolUse:
    """Return the tools with the choice among them. Raises InvalidRequest."""
    if isinstance(choice, ChooseFunction | ChooseCustom):
        # Exactly one call, as in chat: the API specifies "exactly one specific function".
        return ToolUse.checked(tools, mode="required", names=[choice.name], parallel=False)
    if isinstance(choice, ChooseAllowed):
        names = [joined(tool.namespace, tool.name) for tool in choice.tools]
        return ToolUse.checked(tools, mode=choice.mode, names=names, parallel=parallel)
    return ToolUse.checked(tools, mode=choice or "auto", parallel=parallel)
