"""Schemas of a request, reduced to the part that a grammar can enforce, and errors for the rest."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import msgspec

from weft.common.errors import InvalidRequest
from weft.common.log import get_logger
from weft.front.protocol.parse import printable
from weft.grammar.json_schema.keywords import LLGUIDANCE
from weft.grammar.json_schema.loose import loosened
from weft.grammar.json_schema.schema import LeftOut, read_schema
from weft.text.parsing.parser import Tool
from weft.types.grammar import JsonSchema

log = get_logger(__name__)
MAX_LOGGED = 200
"""Maximum number of different log lines about dropped keywords. Clients choose the schemas."""
_OPEN = {"type": "object", "additionalProperties": True}


def enforceable_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return ``tools`` without keywords that no grammar can enforce. Strict tools stay unchanged, except
    yielding tools."""
    return tuple(tool if _keeps_schema(tool) else _enforceable(tool) for tool in tools)


def open_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return ``tools`` with any object as arguments. Strict tools stay unchanged, except yielding tools."""
    return tuple(
        tool if _keeps_schema(tool) else msgspec.structs.replace(tool, parameters=_OPEN, strict=False)
        for tool in tools
    )


def all_strict(tools: Sequence[Tool]) -> bool:
    """Return True if no schema of ``tools`` may lose a keyword."""
    return all(map(_keeps_schema, tools))


def enforceable_form(form: JsonSchema, param: str, error: InvalidRequest) -> JsonSchema:
    """Return ``form`` without keywords that a grammar cannot enforce, and log the keywords.

    Raises ``error`` if there is no such keyword.
    """
    schema = json.loads(form.schema)
    made, left_out = loosened(schema, LLGUIDANCE) if isinstance(schema, dict) else (schema, [])
    if not left_out:
        raise error
    _log_left_out(param, left_out)
    return JsonSchema(schema=json.dumps(made, ensure_ascii=False), compact=form.compact)


def with_tool_at_fault(error: InvalidRequest, tools: Sequence[Tool]) -> InvalidRequest:
    """Return ``error`` with the tool and the place in the schema, if one schema alone is the reason.

    ``error`` of a model family that writes one parameter at a time names neither the tool nor the place.
    """
    for number, tool in enumerate(tools):
        try:
            read_schema(json.dumps(tool.arguments), LLGUIDANCE)
        except InvalidRequest as found:
            way = "; set strict to false to drop the keyword" if tool.strict else ""
            return InvalidRequest(
                f"tools[{number}] ({tool.name}): {found.message}{way}",
                param=error.param or "tools",
                code=error.error_code,
            )
    return error


def with_hint(error: InvalidRequest, form: object, may_loosen: bool) -> InvalidRequest:
    """Return ``error`` with a hint, if dropping a keyword of the schema would help. ``may_loosen``: the
    request has a field ``strict``, which drops the keyword."""
    if not isinstance(form, JsonSchema):
        return error
    try:
        made = loosened(json.loads(form.schema), LLGUIDANCE)[1]
    except (InvalidRequest, AttributeError):
        return error
    advice = "set strict to false to drop the keyword" if may_loosen else "remove the keyword from the schema"
    way = f"; {advice}" if made else ""
    return InvalidRequest(error.message + way, param=error.param, code=error.error_code)


def _keeps_schema(tool: Tool) -> bool:
    """Return True if the schema of ``tool`` must be enforced as a whole."""
    return tool.strict and not tool.yields


def _enforceable(tool: Tool) -> Tool:
    """Return ``tool`` not strict, without keywords that a grammar cannot enforce (logged).

    An invalid schema is replaced by a schema for any object.
    """
    try:
        made, left_out = loosened(tool.arguments, LLGUIDANCE)
    except InvalidRequest:
        return msgspec.structs.replace(tool, parameters=_OPEN, strict=False)
    _log_left_out(f"tool {tool.name}", left_out)
    return msgspec.structs.replace(tool, parameters=made, strict=False)


def log_unenforced(where: str, what: str) -> None:
    """Log a constraint that no grammar can enforce: only the first time, and at most ``MAX_LOGGED`` lines."""
    if _log_once.cache_info().currsize < MAX_LOGGED:
        _log_once(f"{printable(where, 80)}: {printable(what, 240)}")


def _log_left_out(where: str, left_out: Sequence[LeftOut]) -> None:
    for one in left_out:
        log_unenforced(where, f"{one.keyword} (at {one.at or '/'})")


@functools.lru_cache(MAX_LOGGED)
def _log_once(line: str) -> None:
    log.warning("no grammar can enforce this part of a schema, so outputs may violate it: %s", line)
