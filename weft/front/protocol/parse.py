"""Parsing of request bodies: strict types, every field known, each error naming its parameter.

An absent field and a null field mean the same. Unsupported parameters are rejected with 400 that names the
field, except values without effect (``Body.neutral``). A parameter that would change the answer is never
accepted and then ignored. Labels (``user`` and the like) and hints (``Body.hints``) are checked and have no
effect.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from weft.common.errors import InvalidRequest, NotFound
from weft.front.protocol.type_walk import values_at, without_nulls

_MALFORMED = "jSON is malformed: "
MAX_NAME = 512
"""Maximum characters of a model name, a user, a metadata key or value."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a request. The struct's fields are the supported parameters."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {}
    """Parameter -> predicate, True for values without effect. Such values are dropped, for fields, too."""
    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Parameters known but not supported."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Unsupported parameter -> what this server does instead, for the error."""
    hints: ClassVar[Mapping[str, Any]] = {}
    """Parameter -> type, for parameters that affect no answer: checked and dropped."""

    def check(self) -> None:
        """Check rules beyond the types. Raises InvalidRequest."""


B = TypeVar("B", bound=Body)


def parse(body: bytes, cls: type[B]) -> B:
    """Return the request in ``body``. Raises InvalidRequest (400) for an invalid body."""
    return make(decode(body), cls)


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``, which may begin with a byte order mark. Raises InvalidRequest for
    anything else."""
    try:
        data = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8))
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        why = _malformed(error, body)
        raise InvalidRequest(f"the body is not valid JSON: {why}", code="invalid_json") from None
    except ValueError:
        raise InvalidRequest(
            "the body is not valid JSON: the text is not UTF-8", code="invalid_json"
        ) from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return data


def _malformed(error: msgspec.MsgspecError, body: bytes) -> str:
    """Return why ``body`` is not valid JSON."""
    why = _reason(error).removeprefix(_MALFORMED)
    if "truncated" not in why:
        return why
    if not body.removeprefix(codecs.BOM_UTF8).strip():
        return "the body is empty"
    if not body.rstrip().endswith(b"}"):
        return why
    # Clients cut texts inside an emoji. The parser looks for the second half in the next 6 bytes, and calls a
    # body that ends before truncated. Space behind the body brings out the real error.
    try:
        msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8) + b" " * 6)
    except msgspec.MsgspecError as found:
        return _reason(found).removeprefix(_MALFORMED)
    return why


def make(data: Mapping[str, Any], cls: type[B]) -> B:
    """Return the checked request made from JSON values.

    Raises InvalidRequest for unknown, unsupported, missing or invalid parameters.
    """
    fields = _fields(cls)
    neutral = cls.neutral
    values: dict[str, Any] = {}
    for name, value in data.items():
        # Null and values without effect count as absent, even for unsupported parameters.
        if value is None or (name in neutral and neutral[name](value)):
            continue
        if name in cls.hints:
            convert(name, value, cls.hints[name])
            continue
        if name not in fields:
            raise _refused(name, cls)
        values[name] = convert(name, value, fields[name].type)
    for name, field in fields.items():
        if field.required and name not in values:
            raise missing(name)
    request = cls(**values)
    request.check()
    return request


@functools.cache
def _fields(cls: type[Any]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a request by name. ``msgspec.structs.fields`` evaluates all annotations again,
    which takes longer than everything else of a short request."""
    return {field.name: field for field in msgspec.structs.fields(cls)}


def _refused(name: str, cls: type[Body]) -> InvalidRequest:
    """Return the error for a parameter that the request does not have."""
    if name in cls.unsupported or name in cls.neutral:  # here with a value that has an effect
        hint = f": {cls.instead[name]}" if name in cls.instead else ""
        return InvalidRequest(
            f"{name} is not supported by this server{hint}", param=name, code="unsupported_parameter"
        )
    shown = printable(name, 64)
    return InvalidRequest(f"unknown parameter: {shown}", param=shown, code="unknown_parameter")


def convert(name: str, value: Any, target: Any) -> Any:
    """Return ``value`` converted to type ``target``. Raises InvalidRequest that names ``name``."""
    try:
        return _converted(value, target)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name}: {_reason(error)}{_choices(error, target)}", param=name) from None
    except RecursionError:
        raise InvalidRequest(f"{name} is nested too deeply", param=name) from None


def _converted(value: Any, target: Any) -> Any:
    """Return ``value`` converted to type ``target``. A null field counts as absent, also if the type does
    not have the field: clients send all fields of their own types. Raises ValidationError."""
    try:
        return msgspec.convert(value, target)
    except msgspec.ValidationError:
        # Only now: most values have no null in a wrong place, and the walk takes longer than the conversion.
        return msgspec.convert(without_nulls(value, target), target)


def _reason(error: msgspec.MsgspecError) -> str:
    text = printable(str(error).replace("`", ""), 200)
    return text[:1].lower() + text[1:]


def _choices(error: msgspec.ValidationError, target: Any) -> str:
    """Return the values that a field takes, if ``error`` refuses a value of a field with few values."""
    text = str(error)
    if not text.startswith(("Invalid enum value", "Invalid value")):
        return ""
    _, _, path = text.rpartition(" - at ")
    named = values_at(target, path.strip("`"))
    return f"; supported: {', '.join(named)}" if named else ""


def missing(name: str) -> InvalidRequest:
    """Return the error for a request without the parameter ``name``."""
    return InvalidRequest(f"{name} is required", param=name, code="missing_required_parameter")


def unknown_model(name: str) -> NotFound:
    """Return the error for a model that the server does not have, or that the client's key may not use."""
    return NotFound(
        f"the model {printable(name, 64)} does not exist here; GET /v1/models lists the models",
        param="model",
        code="model_not_found",
    )


def printable(text: str, limit: int) -> str:
    """Return ``text`` cut to ``limit`` characters and without control characters, for quotes from a
    client."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def short(name: str, text: str) -> None:
    """Raise InvalidRequest unless ``text`` has 1 to ``MAX_NAME`` characters."""
    if not 1 <= len(text) <= MAX_NAME:
        raise InvalidRequest(f"{name} must have 1 to {MAX_NAME} characters", param=name)


def between(name: str, value: int, low: int, high: int) -> None:
    """Raise InvalidRequest unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}", param=name)
