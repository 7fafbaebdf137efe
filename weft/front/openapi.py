"""The API's description at /openapi.json, made from the same structs that parse and answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from weft.front import answers
from weft.front.protocol.chat import ChatRequest
from weft.front.protocol.completions import CompletionRequest
from weft.front.protocol.embeddings import EmbeddingRequest

_SHOWN = (
    ChatRequest,
    CompletionRequest,
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.Completion,
    EmbeddingRequest,
    answers.EmbeddingList,
    answers.ModelList,
    answers.ModelCard,
    answers.ErrorResponse,
)


def components() -> dict[str, Any]:
    """JSON schemas of everything that requests and answers are made of."""
    _, schemas = msgspec.json.schema_components(_SHOWN, ref_template="#/components/schemas/{name}")
    for request in (ChatRequest, CompletionRequest, EmbeddingRequest):
        schemas[request.__name__]["additionalProperties"] = False
    return schemas


def _json(schema: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {
        str(status): {"description": "Error", "content": _json(answers.ErrorResponse)} for status in statuses
    }


def generates(request: type, answer: type, chunk: type | None) -> dict[str, Any]:
    """What FastAPI can't see of a route that generates: its body and its answers. Without ``chunk`` it does
    not stream.
    """
    content = _json(answer)
    if chunk is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": f"With stream: events, each a {chunk.__name__}, then [DONE].",
            }
        }
    return {
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {
            "200": {"description": "The answer", "content": content},
            **_errors(400, 401, 404, 413, 415, 429, 500, 503, 504),
        },
    }


def returns(answer: type) -> dict[str, Any]:
    """The same for a route that only answers."""
    return {"responses": {"200": {"description": "OK", "content": _json(answer)}, **_errors(401, 404)}}


def probes() -> dict[str, Any]:
    """The same for a route that says the server's state."""
    kinds = {"200": "Yes", "503": "No"}
    schema = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
    content = {"application/json": {"schema": schema}}
    return {"responses": {s: {"description": text, "content": content} for s, text in kinds.items()}}


def secure(document: dict[str, Any], open_paths: Iterable[str]) -> None:
    """Adds to a whole document how a key is sent, and that ``open_paths`` need none."""
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{"bearer": []}, {"x-api-key": []}, {}]  # none, where the server has no key
    for path in open_paths:
        for operation in document["paths"][path].values():
            operation["security"] = []
