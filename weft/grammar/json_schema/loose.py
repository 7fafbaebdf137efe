"""Schemas without the keywords a grammar cannot enforce."""

from __future__ import annotations

import json
from typing import Any

from weft.common.errors import InvalidRequest
from weft.grammar.json_schema.normal import lookup, normal
from weft.grammar.json_schema.schema import LeftOut, SchemaKeywords, SchemaReader, check_nesting

MAX_NODES = 100_000
"""Maximum parts of a schema. A shared part counts once per use."""


def loosened(schema: dict[str, Any], keywords: SchemaKeywords) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return (copy of ``schema`` without the keywords refused by ``read_schema``, these keywords).

    ``schema`` does not change. A ``oneOf`` with overlapping schemas becomes ``anyOf``. Raises InvalidRequest
    for an invalid schema and for a schema too large for any grammar.
    """
    check_nesting(schema)
    plain = normal(schema)
    reader = SchemaReader(plain, keywords, loose=True)
    reader.read()
    _check_size(plain)  # the copy duplicates each shared part
    made = json.loads(json.dumps(plain))
    for one in reader.left_out:
        place = lookup(made, one.at)
        value = place.pop(one.keyword)
        if one.keyword == "oneOf" and "anyOf" not in place:
            place["anyOf"] = value
    return made, reader.left_out


def _check_size(schema: Any) -> None:
    """Raise InvalidRequest for a schema with more than ``MAX_NODES`` parts.

    ``normal`` makes many properties share one object. If such sharing is nested, the text of the schema grows
    exponentially.
    """
    stack, nodes = [schema], 0
    while stack:
        part = stack.pop()
        nodes += 1
        if nodes > MAX_NODES:
            raise InvalidRequest(f"the schema has more than {MAX_NODES} parts")
        if isinstance(part, dict):
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)
