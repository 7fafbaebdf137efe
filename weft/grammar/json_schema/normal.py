"""Normalize JSON schemas to one form with the meaning of the standards.

Four things change before any other reader. A keyword with the value null is removed, because serializers
write unset fields as null. ``nullable`` (OpenAPI 3.0) adds null to ``type``. References by ``$id`` and
``$anchor`` become JSON pointers from the top. ``propertyNames`` becomes properties or a pattern of
properties, if possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from weft.grammar.json_schema.property_names import without_property_names

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
"""Keywords with a list of schemas. ``items`` is a list only in older drafts."""
BY_NAME = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
"""Keywords with schemas by name."""
_VALUES = frozenset(["const", "default", "example"])
"""Keywords with null as a valid value."""


def normal(document: dict[str, Any]) -> dict[str, Any]:
    """Return ``document`` in normal form. The argument stays unchanged.

    An unknown reference stays as written. The caller must bound the nesting.
    """
    names = _Names(document)
    made: dict[str, Any] = _normal(document, names, "")
    return made


def without_nulls(schema: Any) -> Any:
    """Return ``schema`` without the keywords whose value is null."""
    return _normal(schema, None, "")


def step(key: str) -> str:
    """Return ``key`` as one step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def lookup(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer. Raises LookupError if the pointer leads to nothing."""
    found = document
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and len(name) < 10:
            found = found[int(name)]
        else:
            raise LookupError(pointer)
    return found


def inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas of a schema, each with its relative pointer."""
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            yield from ((f"/{key}/{step(name)}", inner) for name, inner in value.items())
        # ``items`` is in LISTS and in ONE: the value decides.
        elif key in LISTS and isinstance(value, list):
            yield from ((f"/{key}/{number}", inner) for number, inner in enumerate(value))
        elif key in ONE:
            yield f"/{key}", value


def _normal(schema: Any, names: _Names | None, at: str) -> Any:
    """Return a copy of ``schema`` in normal form.

    With ``names`` None, only null keywords are removed. ``at``: pointer of the schema.
    """
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None and key not in _VALUES:
            continue
        # Recurse only into schemas: values such as ``enum`` or ``default`` may look like schemas.
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
        return without_property_names(made, names.target) or made
    return made


def _uri(base: str, name: str) -> str:
    """Return ``name`` relative to the URI ``base``, without the fragment; ``name`` if no URI."""
    try:
        return urldefrag(urljoin(base, name)).url
    except ValueError:
        return name


class _Names:
    """The ``$id`` and ``$anchor`` names of a document, and the named schemas."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Collect the names in ``document``, which does not change."""
        self._document = document
        draft = document.get("$schema")
        # Only the oldest drafts use ``id`` as a name. In later drafts ``id`` is an ordinary word.
        old = isinstance(draft, str) and ("draft-03" in draft or "draft-04" in draft)
        self._key = "id" if old else "$id"
        self._bases: dict[str, str] = {"": ""}
        """Pointer to URI, for each schema that starts an embedded document."""
        self._places: dict[str, str] = {}
        """URI to pointer. The URI of an anchor contains ``#``."""
        self._around: dict[str, str] = {"": ""}
        """Pointer of each schema to the pointer of the embedded document around."""
        self._collect(document, "", "")

    def _collect(self, schema: Any, at: str, base: str) -> None:
        """Record the names in ``schema`` at pointer ``at``. ``base``: pointer of the embedded document
        around."""
        if not isinstance(schema, dict):
            return
        own = schema.get(self._key)
        if isinstance(own, str) and not own.startswith("#"):
            self._bases[at] = _uri(self._bases[base], own)
            self._places[self._bases[at]] = base = at
        self._around[at] = base
        anchor = schema.get("$anchor")
        if isinstance(own, str) and own.startswith("#"):  # an anchor in the form of drafts up to 7
            anchor = own[1:]
        if isinstance(anchor, str) and anchor:
            self._places[f"{self._bases[base]}#{anchor}"] = at
        for where, inner in inner_schemas(schema):
            self._collect(inner, at + where, base)

    def pointer(self, reference: str, at: str) -> str:
        """Return ``reference`` as a pointer from the top; unchanged if the name is unknown."""
        base = self._around.get(at, "")
        # ``target`` selects an embedded document, ``fragment`` a pointer or an anchor inside.
        target, _, fragment = reference.partition("#")
        if target:
            found = self._places.get(_uri(self._bases[base], target))
        else:
            found = base
        if found is None:
            return reference
        if not fragment or fragment.startswith("/"):
            return f"#{found}{unquote(fragment)}"
        anchored = self._places.get(f"{self._bases[found]}#{fragment}")
        return reference if anchored is None else f"#{anchored}"

    def target(self, pointer: str) -> Any:
        """Return the schema at a pointer from the top, in the original form; None if missing."""
        try:
            return lookup(self._document, pointer.removeprefix("#"))
        except LookupError:
            return None
