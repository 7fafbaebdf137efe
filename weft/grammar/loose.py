"""Schemas without what a grammar cannot hold to."""

from __future__ import annotations

import json
from typing import Any

from weft.grammar.normal import lookup, normal
from weft.grammar.schema import Keywords, LeftOut, SchemaReader, check_nesting


def loosened(schema: dict[str, Any], keywords: Keywords) -> tuple[dict[str, Any], list[LeftOut]]:
    """``schema`` without the keywords that ``read_schema`` would refuse, and these keywords.

    A ``oneOf`` whose schemas do not exclude each other becomes ``anyOf``. Raises InvalidRequest for what is
    no schema, or too large for any grammar.
    """
    check_nesting(schema)
    plain = normal(schema)
    reader = SchemaReader(plain, keywords, loose=True)
    reader.read()
    made = json.loads(json.dumps(plain))
    for one in reader.left_out:
        place = lookup(made, one.at)
        value = place.pop(one.keyword)
        if one.keyword == "oneOf" and "anyOf" not in place:
            place["anyOf"] = value
    return made, reader.left_out
