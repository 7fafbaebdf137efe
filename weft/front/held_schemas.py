"""What a grammar can hold of the schemas that a request brings: what is left out, and what an error names."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import msgspec

from weft.common.errors import InvalidRequest
from weft.common.log import get_logger
from weft.front.protocol.parse import printable
from weft.grammar.keywords import LLGUIDANCE
from weft.grammar.loose import loosened
from weft.grammar.schema import LeftOut, read_schema
from weft.text.parsing.parser import Tool
from weft.types.grammar import JsonSchema

log = get_logger(__name__)
MAX_SAID = 200
"""Different lines about left-out keywords in the log of one process. Clients choose the schemas."""
_OPEN = {"type": "object", "additionalProperties": True}


def tools_held(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """``tools`` without the keywords that no grammar can hold to. Strict tools stay, except yielding ones."""
    return tuple(tool if _firm(tool) else _held(tool) for tool in tools)


def tools_open(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """``tools`` with any object as arguments. Strict tools stay, except yielding ones."""
    return tuple(
        tool if _firm(tool) else msgspec.structs.replace(tool, parameters=_OPEN, strict=False)
        for tool in tools
    )


def all_firm(tools: Sequence[Tool]) -> bool:
    """True where no schema may lose anything."""
    return all(map(_firm, tools))


def form_held(form: JsonSchema, param: str, error: InvalidRequest) -> JsonSchema:
    """``form`` without the keywords that a grammar cannot hold to. Raises ``error`` where all can be held."""
    schema = json.loads(form.schema)
    made, left_out = loosened(schema, LLGUIDANCE) if isinstance(schema, dict) else (schema, [])
    if not left_out:
        raise error
    _say(param, left_out)
    return JsonSchema(schema=json.dumps(made, ensure_ascii=False), compact=form.compact)


def blamed(error: InvalidRequest, tools: Sequence[Tool]) -> InvalidRequest:
    """``error`` with the tool and the place in its schema, where one schema alone is the reason.

    The grammar of a family that writes a parameter at a time knows neither.
    """
    for number, tool in enumerate(tools):
        try:
            read_schema(json.dumps(tool.arguments), LLGUIDANCE)
        except InvalidRequest as found:
            way = "; set strict to false to leave it out" if tool.strict else ""
            return InvalidRequest(
                f"tools[{number}] ({tool.name}): {found.message}{way}",
                param=error.param or "tools",
                code=error.error_code,
            )
    return error


def advised(error: InvalidRequest, form: object) -> InvalidRequest:
    """``error`` with the way out, where leaving a keyword out of the schema is one."""
    if not isinstance(form, JsonSchema):
        return error
    try:
        made = loosened(json.loads(form.schema), LLGUIDANCE)[1]
    except (InvalidRequest, AttributeError):
        return error
    way = "; set strict to false to leave it out" if made else ""
    return InvalidRequest(error.message + way, param=error.param, code=error.error_code)


def _firm(tool: Tool) -> bool:
    return tool.strict and not tool.yields


def _held(tool: Tool) -> Tool:
    try:
        made, left_out = loosened(tool.arguments, LLGUIDANCE)
    except InvalidRequest:
        return msgspec.structs.replace(tool, parameters=_OPEN, strict=False)
    _say(f"tool {tool.name}", left_out)
    return msgspec.structs.replace(tool, parameters=made, strict=False)


def say_left_out(where: str, what: str) -> None:
    """Logs something that no grammar can hold to: the first time, and at most ``MAX_SAID`` such lines."""
    if _said.cache_info().currsize < MAX_SAID:
        _said(f"{printable(where, 80)}: {printable(what, 240)}")


def _say(where: str, left_out: Sequence[LeftOut]) -> None:
    for one in left_out:
        say_left_out(where, f"{one.keyword} (at {one.at or '/'})")


@functools.lru_cache(MAX_SAID)
def _said(line: str) -> None:
    log.warning("outputs are held to all of a request but for what no grammar can hold to: %s", line)
