"""Tools that an answer may or must call, in the common form of all APIs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.tool_schema import check_schema
from weft.grammar.json_schema.normal import without_nulls
from weft.text.parsing.parser import Tool

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
    def told(self) -> tuple[Tool, ...]:
        """Tools shown by the chat template."""
        return () if self.mode == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Tools that the model may call."""
        if self.names is None:
            return self.told
        return tuple(tool for tool in self.told if tool.name in self.names)


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
