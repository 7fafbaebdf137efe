"""Read JSON schemas strictly: keep every part a backend can enforce exactly, refuse everything else by name.

The result has the same meaning with fewer keywords. Annotations are dropped. Formats and patterns become one
whole-text pattern. ``oneOf`` of mutually exclusive schemas becomes ``anyOf``. For requests that allow a
loose schema, ``loose.py`` removes the keywords refused here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Never

import msgspec

from weft.common.errors import InvalidRequest
from weft.grammar.json_schema.disjoint import Disjoint
from weft.grammar.json_schema.formats import FORMATS, INTEGERS, NOTES
from weft.grammar.json_schema.normal import lookup, normal, step
from weft.grammar.json_schema.patterns import RUST, Dialect, whole_pattern
from weft.grammar.json_schema.schema_values import (
    Unenforceable,
    bound,
    check_constant,
    check_text,
    count,
    shown,
)

MAX_NESTING = 64
"""Maximum levels of arrays and objects in the text of a schema."""
MAX_SCHEMAS = 4000
"""Maximum subschemas of a schema."""
MAX_TARGETS = 256
"""Maximum number of reference targets."""
MAX_PROPERTIES = 1000
"""Maximum properties of one object."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "nullable",  # ``normal`` has already added null to the type
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "propertyOrdering",
        "discriminator",
        "markdownDescription",
        "enumDescriptions",
        "enumNames",
        "xml",
        "externalDocs",
    ]
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "maxProperties"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_UNSUPPORTED = "is not supported"


class SchemaKeywords(msgspec.Struct, frozen=True, kw_only=True):
    """The keywords a backend enforces, as measured by bench/grammars.py."""

    backend: str
    supported: frozenset[str]
    """Supported keywords in this module's output form. Annotations and definitions are not listed."""
    dialect: Dialect = RUST
    """Dialect of the backend's patterns."""


def read_schema(text: str, keywords: SchemaKeywords) -> Any:
    """Return the schema in JSON text ``text``, rewritten for a backend: an object, or True.

    Raises InvalidRequest with the keyword and its position as a JSON pointer.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidRequest("the JSON schema is not valid JSON") from None
    if schema is True:
        return True
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object")
    check_nesting(schema)
    return SchemaReader(normal(schema), keywords).read()


class LeftOut(msgspec.Struct, frozen=True):
    """A keyword removed from a schema."""

    at: str
    """JSON pointer of the schema with the keyword."""
    keyword: str


def _no_constant(name: str) -> Never:
    raise ValueError(name)


def check_nesting(schema: Any) -> None:
    """Raise InvalidRequest for a schema with too many levels. Uses no recursion."""
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        # Level by level, so that the recursion limit cannot be reached.
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise InvalidRequest(f"the JSON schema is nested more than {MAX_NESTING} levels deep")


class SchemaReader:
    """Rewrites one document. Every reference target becomes a definition of the result."""

    def __init__(self, document: dict[str, Any], keywords: SchemaKeywords, *, loose: bool = False) -> None:
        """``keywords``: the keywords that the backend enforces.

        ``loose``: keywords a backend cannot enforce are recorded in ``left_out`` instead of refused.
        """
        self.left_out: list[LeftOut] = []
        self._loose = loose
        self._step = step if loose else _step
        self._document = document
        self._keywords = keywords
        self._count = 0
        self._targets: dict[str, Any] = {}
        """Rewritten targets of references by pointer; None until the target is read."""
        self._unread: list[str] = []
        self._disjoint = Disjoint(self.resolve)
        self._exclusive: list[tuple[list[Any], str]] = []
        """The schemas of each ``oneOf``, with the position of the ``oneOf``."""
        self._readers: dict[str, Callable[[Any, dict[str, Any], str], dict[str, Any]]] = {
            "type": self._read_type,
            "enum": self._read_enum,
            "const": self._read_const,
            "$ref": self._read_ref,
            "allOf": self._read_all_of,
            "anyOf": self._read_any_of,
            "oneOf": self._read_one_of,
            "properties": self._read_properties,
            "patternProperties": self._read_pattern_properties,
            "required": self._read_required,
            "additionalProperties": self._read_additional,
            "minProperties": self._read_min_properties,
            "items": self._read_items,
            "prefixItems": self._read_prefix_items,
            "multipleOf": self._read_multiple_of,
            "pattern": self._read_pattern,
            "format": self._read_format,
        }

    def read(self) -> Any:
        """Return the rewritten document, with ``$defs`` for the targets of references. Call once.

        Raises InvalidRequest. A loose reader lists unenforceable keywords in ``left_out`` instead.
        """
        result = self._schema(self._document, "")
        while self._unread:
            pointer = self._unread.pop()
            self._targets[pointer] = self._schema(self.resolve(pointer), pointer[1:])
        # Check exclusivity last: by now all schemas, including reference targets, are known to be valid.
        for schemas, at in self._exclusive:
            if not self._loose:
                self._disjoint.check(schemas, at)
            elif not self._disjoint.all(schemas):
                self.left_out.append(LeftOut(at.removesuffix("/oneOf"), "oneOf"))
        if self._targets:
            self._check_cycles()
            # Each target gets a new definition name: the original place may be gone or rewritten.
            names = {pointer: f"d{number}" for number, pointer in enumerate(self._targets)}
            defined = {names[pointer]: target for pointer, target in self._targets.items()}
            result = {
                **_renamed(result, names),
                "$defs": {key: _renamed(value, names) for key, value in defined.items()},
            }
        return result

    def resolve(self, pointer: str, at: str = "") -> Any:
        """Return the target of a reference in the client's own form.

        Raises InvalidRequest if the reference leads outside, to nothing, or to no schema.
        """
        if pointer != "#" and not pointer.startswith("#/"):
            self._refuse("$ref", at, "points outside of the schema")
        try:
            found = lookup(self._document, pointer[1:])
        except LookupError:
            self._refuse("$ref", at, "points to nothing")
        if not isinstance(found, dict | bool):
            self._refuse("$ref", at, "points to a value that is not a schema")
        return found

    def _schema(self, schema: Any, at: str) -> Any:
        """Return one rewritten schema.

        ``at``: JSON pointer of the schema. Raises InvalidRequest, and Unenforceable unless loose.
        """
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise InvalidRequest(f"the JSON schema has more than {MAX_SCHEMAS} parts")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidRequest(f"a JSON schema must be an object or a boolean (at {at or '/'})")
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _ANNOTATIONS or key in _DEFINITIONS or key.startswith("x-"):
                continue
            try:
                # ``Unenforceable``: the keyword is valid, but no grammar can enforce the keyword.
                result.update(self._keyword(key, value, schema, at))
            except Unenforceable:
                if not self._loose:
                    raise
                self.left_out.append(LeftOut(at, key))
        return self._joined(result, schema, at)

    def _keyword(self, key: str, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the rewritten form of one keyword, as keywords to merge.

        The key "" stands for further parts of allOf. Raises InvalidRequest, or Unenforceable for a keyword
        that no grammar can enforce.
        """
        here = f"{at}/{self._step(key)}"
        if key in _COUNTS:
            return {key: count(value, here)}
        if key in _BOUNDS:
            return {key: bound(value, here)}
        if key in self._readers:
            return self._readers[key](value, schema, here)
        self._refuse(key, at, _UNSUPPORTED)

    def _joined(self, result: dict[str, Any], schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Merge the rewritten keywords, in place, and return the schema.

        Raises Unenforceable or InvalidRequest for a keyword without support by the backend.
        """
        more = result.pop("", None)
        if more:
            result["allOf"] = [*result.get("allOf", ()), *more]
        for key in result:
            # Check the rewritten keywords: a client's keyword may have become another keyword.
            if key not in self._keywords.supported:
                self._refuse(key, at, _UNSUPPORTED)
        return result

    # One method per keyword: (value, the surrounding schema, pointer) -> keywords of the result. The key ""
    # lists schemas to add to ``allOf``.

    def _read_type(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the checked type or list of types. Raises InvalidRequest."""
        types = value if isinstance(value, list) else [value]
        for one in types:
            if one not in _TYPES:
                raise InvalidRequest(f"{shown(one)} is not a JSON type (at {at})")
        if not types:
            raise InvalidRequest(f"a list of types must not be empty (at {at})")
        return {"type": types[0] if len(types) == 1 else list(dict.fromkeys(types))}

    def _read_enum(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the checked values.

        Raises InvalidRequest, or Unenforceable for a value without a unique spelling.
        """
        if not isinstance(value, list) or not value:
            raise InvalidRequest(f"enum must be a list of at least one value (at {at})")
        for one in value:
            check_constant(one, at)
        return {"enum": value}

    def _read_const(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        check_constant(value, at)
        return {"const": value}

    def _read_ref(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the reference and put a new target on the list to read. Raises InvalidRequest."""
        if not isinstance(value, str):
            self._refuse("$ref", at, "must be a string")
        if value not in self._targets:
            if len(self._targets) >= MAX_TARGETS:
                raise InvalidRequest(f"references point to more than {MAX_TARGETS} places (at {at})")
            self.resolve(value, at)
            # Read the target later: a reference may lead to a schema in progress.
            self._targets[value] = None
            self._unread.append(value)
        return {"$ref": value}

    def _read_all_of(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        return {"allOf": self._list(value, at)}

    def _read_any_of(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        return {"anyOf": self._list(value, at)}

    def _read_one_of(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return ``anyOf`` with the rewritten schemas.

        ``read`` checks later that the schemas exclude each other. Raises InvalidRequest for an invalid list
        or schema.
        """
        parts = self._list(value, at)
        self._exclusive.append((value, at))
        # If the schema also has ``anyOf``, both lists must hold.
        if "anyOf" in schema:
            return {"": [{"anyOf": parts}]}
        return {"anyOf": parts}

    def _list(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise InvalidRequest(f"a list of at least one schema is expected (at {at})")
        return [self._schema(one, f"{at}/{number}") for number, one in enumerate(value)]

    def _read_properties(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        return {"properties": self._named(value, at)}

    def _read_pattern_properties(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        named = self._named(value, at)
        return {
            "patternProperties": {_anchored(self._pattern(key, at)): inner for key, inner in named.items()}
        }

    def _named(self, value: Any, at: str) -> dict[str, Any]:
        """Return an object of schemas by name, each rewritten. Raises InvalidRequest."""
        if not isinstance(value, dict):
            raise InvalidRequest(f"an object of schemas is expected (at {at})")
        if len(value) > MAX_PROPERTIES:
            raise InvalidRequest(f"an object has more than {MAX_PROPERTIES} properties (at {at})")
        for key in value:
            check_text(key, at)
        return {key: self._schema(inner, f"{at}/{self._step(key)}") for key, inner in value.items()}

    def _read_required(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the checked names without repetitions; {} for an empty list. Raises InvalidRequest."""
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise InvalidRequest(f"required must be a list of names (at {at})")
        if len(value) > MAX_PROPERTIES:
            raise InvalidRequest(f"an object has more than {MAX_PROPERTIES} properties (at {at})")
        for one in value:
            check_text(one, at)
        return {"required": list(dict.fromkeys(value))} if value else {}

    def _read_additional(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        return {"additionalProperties": self._schema(value, at)}

    def _read_min_properties(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the count, or {} if the required properties satisfy the count.

        Raises Unenforceable for other counts above 1 of an open object.
        """
        least = count(value, at)
        required = schema.get("required")
        if isinstance(required, list) and len(set(map(str, required))) >= least:
            return {}
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if least > 1 and not closed:
            # A key written twice counts once, so a count of written keys proves nothing.
            raise Unenforceable(
                f"minProperties is supported up to the number of required properties (at {at})"
            )
        return {"minProperties": least}

    def _read_items(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        if isinstance(value, list):
            raise Unenforceable(f"items must be one schema; use prefixItems for a list of schemas (at {at})")
        return {"items": self._schema(value, at)}

    def _read_prefix_items(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        return {"prefixItems": self._list(value, at)}

    def _read_multiple_of(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        if bound(value, at) <= 0:
            raise InvalidRequest(f"multipleOf must be greater than 0 (at {at})")
        return {"multipleOf": value}

    def _read_pattern(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        if not isinstance(value, str):
            raise InvalidRequest(f"a pattern must be a string (at {at})")
        return {"pattern": _anchored(self._pattern(value, at))}

    def _read_format(self, value: Any, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the pattern or the bounds of a known format; {} for an unknown format.

        Raises InvalidRequest, or Unenforceable if the backend cannot enforce the pattern.
        """
        if not isinstance(value, str):
            raise InvalidRequest(f"format must be a string (at {at})")
        if value in NOTES:
            return {}
        if value in INTEGERS:
            least, most = INTEGERS[value]
            return {"": [{"minimum": least, "maximum": most}]}
        if value not in FORMATS:  # an unknown format is an annotation, as the standard says
            return {}
        pattern = {"pattern": _anchored(self._pattern(f"^(?:{FORMATS[value]})$", at))}
        return {"": [pattern]} if "pattern" in schema else pattern

    def _pattern(self, pattern: str, at: str) -> str:
        try:
            return whole_pattern(pattern, self._keywords.dialect)
        except InvalidRequest as error:
            raise Unenforceable(f"{error.message} (at {at})") from None

    def _check_cycles(self) -> None:
        """Raise InvalidRequest if a reference leads to itself without a value in between."""
        state: dict[str, bool] = {}
        for start in self._targets:
            # Depth-first search without recursion. ``state``: False on the current path, True when finished.
            stack: list[tuple[str, Iterator[str]]] = []
            if start not in state:
                state[start] = False
                stack.append((start, _same_place(self._targets[start])))
            while stack:
                pointer, inner = stack[-1]
                following = next(inner, None)
                if following is None:
                    state[pointer] = True
                    stack.pop()
                elif state.get(following) is False:
                    self._refuse("$ref", following[1:], "refers to itself")
                elif following not in state:
                    state[following] = False
                    stack.append((following, _same_place(self._targets[following])))

    def _refuse(self, keyword: str, at: str, why: str) -> Never:
        backend = f" by {self._keywords.backend}" if why.startswith(_UNSUPPORTED) else ""
        raise Unenforceable(f"{_step(keyword)} {why}{backend} (at {at or '/'})")


def _same_place(schema: Any) -> Iterator[str]:
    """Yield the references that apply to the same value as ``schema``."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield schema["$ref"]
    for key in ("allOf", "anyOf"):
        for inner in schema.get(key, ()):
            yield from _same_place(inner)


def _renamed(schema: Any, names: dict[str, str]) -> Any:
    """Return ``schema`` with references to the new definition names. Values of enum and const stay."""
    if isinstance(schema, list):
        return [_renamed(inner, names) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key == "$ref":
            value = f"#/$defs/{names[value]}"
        # Names of properties are not keywords: a property may be named ``$ref`` or ``enum``.
        elif key in ("properties", "patternProperties"):
            value = {name: _renamed(inner, names) for name, inner in value.items()}
        elif key not in ("enum", "const"):
            value = _renamed(value, names)
        result[key] = value
    return result


def _anchored(regex: str) -> str:
    return f"^(?:{regex})$"


def _step(key: str) -> str:
    return step(shown(key).strip('"'))
