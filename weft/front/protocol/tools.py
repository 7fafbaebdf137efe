"""Tools that an answer may or must call: the check, the common form of all APIs, and OpenAI's chat form.

Parameter schemas beyond a grammar's means are refused elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.parse import printable
from weft.grammar.json_schema.normal import step, without_nulls
from weft.text.parsing.parser import Tool

MAX_LEVELS = 32
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def check_schema(schema: Any, where: str, at: str = "", levels: int = MAX_LEVELS) -> None:
    """Raise InvalidRequest, naming ``tools``, unless ``schema`` looks like a JSON schema.

    The message contains ``where``, which names the tool, and the place in the schema. A keyword with value
    null counts as absent.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _wrong(where, at, "must be an object")
    if not levels:
        raise _wrong(where, "", f"is nested more than {MAX_LEVELS} levels deep")
    _check_type(schema.get("type"), where, at)
    required = schema.get("required")
    if required is not None and not _is_texts(required):
        raise _wrong(where, at, "must have a list of names in required")
    # Keywords with an object of schemas, a list of schemas, or a single schema; `at` is the JSON pointer.
    for name in _BY_NAME:
        parts = schema.get(name)
        if parts is None:
            continue
        if not isinstance(parts, Mapping):
            raise _wrong(where, at, f"must have an object in {name}")
        for key, part in parts.items():
            check_schema(part, where, f"{at}/{name}/{step(key)}", levels - 1)
    for name in _LISTS:
        parts = schema.get(name)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise _wrong(where, at, f"must have a list in {name}")
        for number, part in enumerate(parts):
            check_schema(part, where, f"{at}/{name}/{number}", levels - 1)
    for name in _ONE:
        if schema.get(name) is not None:
            check_schema(schema[name], where, f"{at}/{name}", levels - 1)


def _check_type(given: Any, where: str, at: str) -> None:
    types = given if isinstance(given, list) else [given]
    if given is not None and not all(isinstance(one, str) and one in _TYPES for one in types):
        raise _wrong(where, at, f"may have only these types: {', '.join(sorted(_TYPES))}")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _wrong(where: str, at: str, what: str) -> InvalidRequest:
    place = f" (at {printable(at, 200)})" if at else ""
    return InvalidRequest(f"{where}: the schema of its parameters {what}{place}", param="tools")


MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/\-]{1,128}")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tools, and the choice among them."""

    tools: tuple[Tool, ...] = ()
    """All tools of the request."""
    mode: Literal["none", "auto", "required"] = "auto"
    """none: the tools are not even shown to the model. required: the answer must be a call."""
    names: tuple[str, ...] | None = None
    """Names of the tools that may be called; None for all."""
    parallel: bool = True
    """True if several calls are allowed."""

    @classmethod
    def checked(
        cls,
        tools: Sequence[Tool],
        *,
        mode: Literal["none", "auto", "required"] = "auto",
        names: Sequence[str] | None = None,
        parallel: bool = True,
    ) -> ToolUse:
        """Return the checked tools and choice, with schemas without nulls.

        ``names``: tools that may be called, None for all. Raises InvalidRequest, naming ``tools`` or
        ``tool_choice``.
        """
        if len(tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools must hold at most {MAX_TOOLS} tools", param="tools")
        known: set[str] = set()
        for number, tool in enumerate(tools):
            _check_tool(tool, number)
            if tool.name in known:
                raise InvalidRequest(
                    f"tools[{number}] has the same name as an earlier tool; give each tool its own name",
                    param="tools",
                )
            known.add(tool.name)
        if mode == "required" and not tools:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if names is not None and (not names or not known.issuperset(names)):
            raise InvalidRequest(
                "tool_choice must name one or more tools of the parameter tools", param="tool_choice"
            )
        # A null in a schema counts as absent, so later steps never see one.
        return cls(
            tools=tuple(
                msgspec.structs.replace(tool, parameters=without_nulls(tool.parameters)) for tool in tools
            ),
            mode=mode,
            names=None if names is None else tuple(dict.fromkeys(names)),
            parallel=parallel,
        )

    @property
    def shown(self) -> tuple[Tool, ...]:
        """Tools shown by the chat template."""
        return () if self.mode == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Tools that the model may call."""
        if self.names is None:
            return self.shown
        return tuple(tool for tool in self.shown if tool.name in self.names)


def _check_tool(tool: Tool, number: int) -> None:
    """Raise InvalidRequest for an invalid name or schema of a tool."""
    where = f"tools[{number}]"
    if not _NAME.fullmatch(tool.name):
        raise InvalidRequest(
            f"{where} must have a name of 1 to 128 of the characters A-Z a-z 0-9 _ . : / -", param="tools"
        )
    where = f"{where} ({tool.name})"
    if tool.parameters.get("type") not in (None, "object"):
        raise InvalidRequest(
            f"{where}: the schema of its parameters must have the type object", param="tools"
        )
    check_schema(tool.parameters, where)
    try:
        msgspec.msgpack.encode(tool.parameters)  # the encoding used between a read worker and the API server
    except (OverflowError, RecursionError):
        raise InvalidRequest(
            f"{where}: the schema of its parameters holds integers of more than 64 bits, or is nested too "
            "deeply",
            param="tools",
        ) from None


class Function(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"returns": "return"}
):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, an object."""
    strict: bool | None = None
    returns: dict[str, Any] | None = None
    """Schema of the result, in the form of transformers' ``get_json_schema``. Not shown to the model."""
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
