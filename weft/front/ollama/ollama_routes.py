"""Routes of Ollama's API, for tools made for Ollama. Streams are JSON lines, and streaming is the default."""

from __future__ import annotations

import functools
import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from weft import __version__
from weft.common.errors import InvalidRequest, TooLarge
from weft.front.http import openapi
from weft.front.http.access import key_of
from weft.front.http.answers import to_json
from weft.front.http.body import Upload, read_json
from weft.front.ollama import ollama_answers as o
from weft.front.ollama.model_facts import ShownModels, models_of, running_of, shown_of, tag_of
from weft.front.ollama.ollama_shape import OllamaShape, OllamaVectors
from weft.front.protocol.ollama_request import (
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaGenerate,
    OllamaShow,
    untagged,
)
from weft.front.protocol.parse import parse
from weft.front.requests.context import Front
from weft.front.requests.serving import Answered, handle

SMALL = 16 << 10
"""Maximum bytes of a body without a prompt: a request to load or to show a model."""
_LINES = "lines, each a JSON object; the last has done: true"


def add_ollama(app: FastAPI, front: Front) -> None:
    """Add the routes to ``app``."""
    _add_generation(app, front)
    _add_embeddings(app, front)
    _add_models(app, front)
    _add_refusals(app)


def _add_generation(app: FastAPI, front: Front) -> None:
    @app.post(
        "/api/chat",
        openapi_extra=openapi.generates(OllamaChat, o.OllamaChatAnswer, _LINES, error=o.OllamaError),
    )
    async def ollama_chat(request: Request) -> Response:
        """Answer a conversation, in Ollama's API. Without messages: load the model."""
        prepare = functools.partial(_loads, front, OllamaChat)
        early = functools.partial(_unloads, front, OllamaChat)
        shape = functools.partial(OllamaShape, chat=True)
        return await handle(front, request, "ollama_chat", shape, prepare, early)

    @app.post(
        "/api/generate",
        openapi_extra=openapi.generates(OllamaGenerate, o.OllamaGenerateAnswer, _LINES, error=o.OllamaError),
    )
    async def ollama_generate(request: Request) -> Response:
        """Answer a prompt, in Ollama's API. Without a prompt: load the model."""
        prepare = functools.partial(_loads, front, OllamaGenerate)
        early = functools.partial(_unloads, front, OllamaGenerate)
        shape = functools.partial(OllamaShape, chat=False)
        return await handle(front, request, "ollama_generate", shape, prepare, early)


def _add_embeddings(app: FastAPI, front: Front) -> None:
    @app.post(
        "/api/embed",
        openapi_extra=openapi.answers_of(OllamaEmbed, o.OllamaEmbedAnswer, error=o.OllamaError),
    )
    async def ollama_embed(request: Request) -> Response:
        """Make a vector of each text, in Ollama's API."""
        shape = functools.partial(OllamaVectors, one=False)
        return await handle(front, request, "ollama_embed", shape)

    @app.post(
        "/api/embeddings",
        openapi_extra=openapi.answers_of(OllamaEmbedding, o.OllamaEmbeddingAnswer, error=o.OllamaError),
    )
    async def ollama_embedding(request: Request) -> Response:
        """Make a vector of one text, in the older form of Ollama's API."""
        shape = functools.partial(OllamaVectors, one=True)
        return await handle(front, request, "ollama_embedding", shape)


def _add_models(app: FastAPI, front: Front) -> None:
    shown = ShownModels(front)

    @app.get("/api/tags", openapi_extra=openapi.returns(o.OllamaTags))
    async def ollama_tags(request: Request) -> Response:
        """List all models, in Ollama's API."""
        models = models_of(front, key_of(request.scope))
        found = await front.in_thread(
            lambda: [tag_of(one.config, name) for one in models for name in one.names]
        )
        return _json(o.OllamaTags(models=found))

    @app.get("/api/ps", openapi_extra=openapi.returns(o.OllamaProcesses))
    async def ollama_ps(request: Request) -> Response:
        """List the loaded models, in Ollama's API."""
        models = [one for one in models_of(front, key_of(request.scope)) if one.loaded]
        running = await front.in_thread(
            lambda: [running_of(one.config, name, one.expires_in) for one in models for name in one.names]
        )
        return _json(o.OllamaProcesses(models=running))

    @app.post("/api/show", openapi_extra=openapi.answers_of(OllamaShow, o.OllamaShown, error=o.OllamaError))
    async def ollama_show(request: Request) -> Response:
        """Describe a model, in Ollama's API."""
        asked = parse(await _small_body(front, request), OllamaShow)
        name = asked.model or asked.name or ""
        if front.several is not None:
            return _json(await shown.of(front.several.plan_of(name, key_of(request.scope))))
        front.check_model(untagged(name, front.model.serves))
        return _json(shown_of(front.config, front.text))

    @app.get("/api/version", openapi_extra=openapi.returns(o.OllamaVersion))
    async def ollama_version() -> Response:
        """Return the server's version, in Ollama's API."""
        return _json(o.OllamaVersion(version=__version__))


def _add_refusals(app: FastAPI) -> None:
    """Add routes that change the models of a server of Ollama. This server's models are fixed by flags."""

    async def refuse(request: Request) -> Response:
        raise InvalidRequest(
            f"{request.scope['path']} is not supported: the flags of weft serve choose the models; "
            "weft pull downloads a model",
            code="unsupported_parameter",
        )

    for path, method in (
        ("pull", "POST"),
        ("push", "POST"),
        ("create", "POST"),
        ("copy", "POST"),
        ("delete", "DELETE"),
    ):
        app.add_api_route(f"/api/{path}", refuse, methods=[method], include_in_schema=False)


async def _small_body(front: Front, request: Request) -> bytes:
    """Return a body of at most ``SMALL`` bytes. Raises the errors of ``read_json``."""
    with front.bodies.upload() as upload:
        body = await read_json(request, upload)
        if sum(map(len, body)) > SMALL:
            raise TooLarge(f"the body must have at most {SMALL} bytes")
        return b"".join(body)


async def _loads(front: Front, cls: type[Any], body: list[bytes], upload: Upload) -> list[bytes]:
    """Return ``body`` unchanged. Raises Answered for a request without a prompt: the model is loaded now."""
    if sum(map(len, body)) > SMALL:
        return body
    asked = parse(b"".join(body), cls)
    if not asked.empty:
        return body
    if front.several is None:  # several models: the request waited until its model was loaded
        front.check_model(untagged(asked.model, front.model.serves))
    raise Answered(_json(_loaded(asked)))


async def _unloads(front: Front, cls: type[Any], body: list[bytes], client: int) -> None:
    """Raise Answered for a request that only unloads a model of several, if the model is not loaded: the
    request must not load the model first. ``client``: number of the API key."""
    if front.several is None or sum(map(len, body)) > SMALL:
        return
    asked = parse(b"".join(body), cls)
    if not asked.empty or asked.seconds_kept() != 0:
        return
    name = front.several.plan_of(asked.model, client).facts.name
    if not front.several.table.admits(name):
        raise Answered(_json(_loaded(asked)))


def _loaded(asked: OllamaBody) -> Any:
    reason = "unload" if asked.seconds_kept() == 0 else "load"
    common: dict[str, Any] = {
        "model": asked.model,
        "created_at": o.at_time(time.time()),
        "done": True,
        "done_reason": reason,
    }
    if isinstance(asked, OllamaChat):
        return o.OllamaChatAnswer(message=o.OllamaMessage(), **common)
    return o.OllamaGenerateAnswer(**common)


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")
