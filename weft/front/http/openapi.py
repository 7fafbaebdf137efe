"""Description of the API at /openapi.json, made from the structs that parse requests and form answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from weft.front.http import answers
from weft.front.protocol.parse import Body

_shown: dict[type, None] = {}
"""Structs of requests and answers, as registered by the routes."""


def components() -> dict[str, Any]:
    """Return the JSON schemas of all registered structs, by name. Schemas of request bodies forbid unknown
    fields."""
    _, schemas = msgspec.json.schema_components(tuple(_shown), ref_template="#/components/schemas/{name}")
    for request in (one for one in _shown if issubclass(one, Body)):
        schemas[request.__name__]["additionalProperties"] = False
    return schemas


def _json(schema: type) -> dict[str, Any]:
    """Return the content of a body or answer of this struct, and register the struct for ``components``."""
    _shown[schema] = None
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}


def _errors(*statuses: int, shape: type = answers.ErrorResponse) -> dict[str, Any]:
    return {str(status): {"description": "Error", "content": _json(shape)} for status in statuses}


def _failures(error: type) -> dict[str, Any]:
    """Return the error answers of a route that reads a body."""
    return _errors(400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503, 504, 529, shape=error)


def generates(
    request: type, answer: type, chunk: type | str, *, error: type = answers.ErrorResponse
) -> dict[str, Any]:
    """Return the parts of a generating route that FastAPI cannot see: body and answers. ``request``,
    ``answer``: structs. ``chunk``: struct or description of the stream's events; ``error``: shape of a
    failure. Registers the structs for ``components``."""
    if isinstance(chunk, str):
        events = chunk
    else:
        events = f"events, each a {chunk.__name__}, then [DONE]"
        _shown[chunk] = None
    content = _json(answer)
    content["text/event-stream"] = {
        "schema": {
            "type": "string",
            "description": f"With stream: {events}.",
        }
    }
    return {
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {
            "200": {"description": "The completion", "content": content},
            **_failures(error),
        },
    }


def answers_of(request: type, answer: type, *, error: type = answers.ErrorResponse) -> dict[str, Any]:
    """Return body and answers of a route that reads a body and generates nothing. Registers the structs for
    ``components``."""
    return {
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {
            "200": {"description": "OK", "content": _json(answer)},
            **_failures(error),
        },
    }


def returns(answer: type, *refusals: int) -> dict[str, Any]:
    """Return the answers of a route without a body. ``refusals``: extra error statuses."""
    errors = _errors(*refusals, 401, 403, 404)
    return {"responses": {"200": {"description": "OK", "content": _json(answer)}, **errors}}


def probes() -> dict[str, Any]:
    """Return the answers of a route that reports the server's state."""
    kinds = {"200": "Yes", "503": "No"}
    missing = {"type": "object", "additionalProperties": {"type": "integer"}}
    fields = {"status": {"type": "string"}, "missing": missing}
    schema = {"type": "object", "properties": fields, "required": ["status"]}
    content = {"application/json": {"schema": schema}}
    return {"responses": {s: {"description": text, "content": content} for s, text in kinds.items()}}


def secure(document: dict[str, Any], open_paths: Iterable[str]) -> None:
    """Add the authentication schemes to ``document``, in place. ``open_paths`` need no key."""
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{"bearer": []}, {"x-api-key": []}, {}]  # {}: no key, for a server without keys
    for path in open_paths:
        for operation in document["paths"].get(path, {}).values():  # a page has no entry
            operation["security"] = []
