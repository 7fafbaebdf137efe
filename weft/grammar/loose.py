"""Schemas without what a grammar cannot hold to."""

from __future__ import annotations

import json
from typing import Any

from weft.common.errors import InvalidRequest
from weft.grammar.normal import lookup, normal
from weft.grammar.schema import Keywords, LeftOut, SchemaReader, check_nesting

MAX_NODES = 100_000
"""Parts of a schema with shared parts counted as often as they stand."""


def loosened(schema: dict[str, Any], keywords: Keywords) -> tuple[dict[str, Any], list[LeftOut]]:
    """``schema`` without the keywords that ``read_schema`` would refuse, and these keywords.

    A ``oneOf`` whose schemas do not exclude each other becomes ``anyOf``. Raises InvalidRequest for what is
    no schema, or too large for any grammar.
    """
    check_nesting(schema)
    plain = normal(schema)
    reader = SchemaReader(plain, keywords, loose=True)
    reader.read()
    _check_size(plain)  # the copy writes each shared part as often as it stands
    made = json.loads(json.dumps(plain))
    for one in reader.left_out:
        place = lookup(made, one.at)
        value = place.pop(one.keyword)
        if one.keyword == "oneOf" and "anyOf" not in place:
            place["anyOf"] = value
    return made, reader.left_out


def _check_size(schema: Any) -> None:
    """Raises InvalidRequest for a schema of more than ``MAX_NODES`` parts.

    ``normal`` gives many properties one object. Nested, the text of such a schema grows by a power.
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
