"""The JSON Schema keywords each backend enforces exactly, as measured (docs/adr/0022)."""

from __future__ import annotations

from weft.grammar.json_schema.patterns import JSON_STRING
from weft.grammar.json_schema.schema import SchemaKeywords

LLGUIDANCE = SchemaKeywords(
    backend="llguidance",
    supported=frozenset(
        [
            "type",
            "enum",
            "const",
            "$ref",
            "allOf",
            "anyOf",
            "properties",
            "patternProperties",
            "required",
            "additionalProperties",
            "minProperties",
            "maxProperties",
            "items",
            "prefixItems",
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
            "pattern",
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "multipleOf",
        ]
    ),
)

XGRAMMAR = SchemaKeywords(
    backend="xgrammar",
    supported=LLGUIDANCE.supported - {"multipleOf", "patternProperties", "minProperties", "maxProperties"},
    dialect=JSON_STRING,
)
"""``narrow`` additionally refuses combinations of keywords of which xgrammar reads only some."""
