"""JSON schemas as their standards mean them: one form, whatever the writer's tools made.

Four things become plain here, before anything else reads a schema. A keyword with the value null is absent:
serializers write their defaults so. ``nullable`` (OpenAPI 3.0) adds null to ``type``. References by ``$id``
and ``$anchor`` become JSON pointers from the top. ``propertyNames`` becomes properties or a pattern of
properties, where it has such a form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from weft.grammar.property_names import spelled_out

ONE = frozenset(
    [
        "items",
        "additionalItems",
        "additionalProperties",
        "unevaluatedItems",
        "unevaluatedProperties",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "propertyNames",
        "contentSchema",
    ]
)
"""Keywords with one schema."""
LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
"""Keywords with a list of schemas. ``items`` was one in older drafts."""
BY_NAME = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
"""Keywords with schemas by name."""
_VALUES = frozenset(["const", "default", "example"])
"""Keywords whose value may be null."""


def normal(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` in this form. The argument is unchanged.

    A reference that is not understood stays as it is. The caller bounds the nesting.
    """
    names = _Names(document)
    made: dict[str, Any] = _normal(document, names, "")
    return made


def without_nulls(schema: Any) -> Any:
    """``schema`` without the keywords that have the value null."""
    return _normal(schema, None, "")


def step(key: str) -> str:
    """One step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def lookup(document: Any, pointer: str) -> Any:
    """The value at a JSON pointer. Raises LookupError."""
    found = document
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found[name]
        elif isinstance(found, list) and name.isdecimal():
            found = found[int(name)]
        else:
            raise LookupError(pointer)
    return found


def inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas right inside of a schema, each with its pointer from there."""
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            yield from ((f"/{key}/{step(name)}", inner) for name, inner in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from ((f"/{key}/{number}", inner) for number, inner in enumerate(value))
        elif key in ONE:
            yield f"/{key}", value


def _normal(schema: Any, names: _Names | None, at: str) -> Any:
    """``names``: None leaves everything but null keywords."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None and key not in _VALUES:
            continue
        here = f"{at}/{step(key)}"
        if key in BY_NAME and isinstance(value, dict):
            value = {name: _normal(inner, names, f"{here}/{step(name)}") for name, inner in value.items()}
        elif key in LISTS and isinstance(value, list):
            value = [_normal(inner, names, f"{here}/{number}") for number, inner in enumerate(value)]
        elif key in ONE:
            value = _normal(value, names, here)
        made[key] = value
    if names is None:
        return made
    if isinstance(made.get("$ref"), str):
        made["$ref"] = names.pointer(made["$ref"], at)
    if made.get("nullable") is True and isinstance(kind := made.get("type"), str | list):
        made["type"] = [*([kind] if isinstance(kind, str) else kind), "null"]
    if "propertyNames" in made:
        return spelled_out(made, names.target) or made
    return made


class _Names:
    """``$id`` and ``$anchor`` of a document, and the schemas that they name."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        draft = document.get("$schema")
        # ``id`` names a schema in the oldest drafts alone; later it is any word.
        old = isinstance(draft, str) and ("draft-03" in draft or "draft-04" in draft)
        self._key = "id" if old else "$id"
        self._bases: dict[str, str] = {"": ""}
        """The URI of each schema that begins a document of its own, by its pointer."""
        self._places: dict[str, str] = {}
        """Pointers by URI; an anchor's with ``#``."""
        self._around: dict[str, str] = {"": ""}
        """The pointer of the document that each schema is in."""
        self._collect(document, "", "")

    def _collect(self, schema: Any, at: str, base: str) -> None:
        if not isinstance(schema, dict):
            return
        own = schema.get(self._key)
        if isinstance(own, str) and not own.startswith("#"):
            self._bases[at] = urldefrag(urljoin(self._bases[base], own)).url
            self._places[self._bases[at]] = base = at
        self._around[at] = base
        anchor = schema.get("$anchor")
        if isinstance(own, str) and own.startswith("#"):  # an anchor, as drafts up to 7 write one
            anchor = own[1:]
        if isinstance(anchor, str) and anchor:
            self._places[f"{self._bases[base]}#{anchor}"] = at
        for where, inner in inner_schemas(schema):
            self._collect(inner, at + where, base)

    def pointer(self, reference: str, at: str) -> str:
        """The reference from the top; unchanged where nothing has its name."""
        base = self._around.get(at, "")
        target, _, fragment = reference.partition("#")
        if target:
            found = self._places.get(urldefrag(urljoin(self._bases[base], target)).url)
        else:
            found = base
        if found is None:
            return reference
        if not fragment or fragment.startswith("/"):
            return f"#{found}{unquote(fragment)}"
        anchored = self._places.get(f"{self._bases[found]}#{fragment}")
        return reference if anchored is None else f"#{anchored}"

    def target(self, pointer: str) -> Any:
        """The schema at a pointer from the top, as it was written; None where there is none."""
        try:
            return lookup(self._document, pointer.removeprefix("#"))
        except LookupError:
            return None
