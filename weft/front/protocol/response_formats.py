"""Required forms of an answer, as written in each API, and the grammar of each form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import OutputConstraint
from weft.front.protocol.parse import Body
from weft.grammar import build
from weft.types.grammar import Grammar


class TextFormat(msgspec.Struct, frozen=True, tag="text", tag_field="type", forbid_unknown_fields=True):
    """Any text: output without a format."""


class JsonObjectFormat(
    msgspec.Struct, frozen=True, tag="json_object", tag_field="type", forbid_unknown_fields=True
):
    """Any JSON object, or JSON valid under ``schema``."""

    schema: dict[str, Any] | bool | None = None


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema, with a name for people."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    """Schema; None for any JSON object."""
    description: str | None = None
    strict: bool | None = None
    """False: the schema loses the keywords that a grammar cannot enforce. Otherwise such a schema is
    refused."""


class JsonSchemaFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="json_schema",
    tag_field="type",
    forbid_unknown_fields=True,
):
    """JSON valid under a schema. The schema is under ``json_schema``, or in the object itself, as in the
    Responses API."""

    json_schema: NamedSchema | None = None
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None

    @property
    def named(self) -> NamedSchema:
        """The schema, from either place."""
        if self.json_schema is not None:
            return self.json_schema
        return NamedSchema(schema=self.schema, strict=self.strict)


class StructuralTagFormat(
    msgspec.Struct, frozen=True, tag="structural_tag", tag_field="type", forbid_unknown_fields=True
):
    """Text with constrained parts, in xgrammar's notation: ``format``, or ``structures`` and ``triggers``."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form: exactly one of the fields."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class Constrained(Body, frozen=True, kw_only=True):
    """Parameters that require a form; at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


_DIRECT = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")


def constraint_of(asked: Constrained) -> OutputConstraint | None:
    """Return the required form of a request's answer; None without a form.

    Raises InvalidRequest for two forms, and for an invalid form.
    """
    fields = ("response_format", "structured_outputs", *_DIRECT)
    asking = [name for name in fields if getattr(asked, name) is not None]
    # `response_format` of type text requires nothing.
    if isinstance(asked.response_format, TextFormat):
        asking.remove("response_format")
    if not asking:
        return None
    if len(asking) > 1:
        raise InvalidRequest(
            f"{asking[0]} and {asking[1]} both set an output format; send only one of the two",
            param=asking[0],
        )
    (param,) = asking
    value = getattr(asked, param)
    if param == "response_format":
        grammar = format_grammar(value, param)
    elif param == "structured_outputs":
        grammar = _structured(value)
    else:
        grammar = _BUILD[param.removeprefix("guided_")](value, param)
    # `strict: false` applies to JSON schemas only.
    named = isinstance(value, JsonSchemaFormat)
    loose = named and value.named.strict is False
    return OutputConstraint(grammar=grammar, param=param, strict=not loose, may_loosen=named)


def format_grammar(form: ResponseFormat, param: str) -> Grammar:
    """Return the grammar of a response format other than ``text``. Raises InvalidRequest."""
    if isinstance(form, JsonSchemaFormat | JsonObjectFormat):
        if isinstance(form, JsonSchemaFormat) and form.json_schema is None and form.schema is None:
            raise InvalidRequest(f"{param} of type json_schema needs json_schema with a schema", param=param)
        schema = form.named.schema if isinstance(form, JsonSchemaFormat) else form.schema
        return build.json_object() if schema is None else build.json_schema(schema, param=param)
    assert isinstance(form, StructuralTagFormat)
    return build.structural_tag(tag_of(form), param=param)


def tag_of(form: StructuralTagFormat) -> dict[str, Any]:
    """Return a structural tag as an object in xgrammar's notation."""
    fields = {name: getattr(form, name) for name in ("format", "structures", "triggers")}
    return {"type": "structural_tag", **{name: value for name, value in fields.items() if value is not None}}


def _structured(asked: StructuredOutputs) -> Grammar:
    """Return the grammar of ``structured_outputs``. Raises InvalidRequest unless exactly one form is set."""
    given = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, regex, choice, grammar, json_object and "
            "structural_tag",
            param="structured_outputs",
        )
    ((name, value),) = given.items()
    return _BUILD[name](value, "structured_outputs")


_BUILD: dict[str, Callable[[Any, str], Grammar]] = {
    "json": lambda value, param: build.json_schema(value, param=param),
    "regex": lambda value, param: build.regex(value, param=param),
    "choice": lambda value, param: build.choice(value, param=param),
    "grammar": lambda value, param: build.context_free(value, param=param),
    "json_object": lambda value, param: build.json_object(),
    "structural_tag": lambda value, param: build.structural_tag(value, param=param),
}
