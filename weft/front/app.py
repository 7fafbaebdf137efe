"""Routes of the API server. Handlers are thin: read, delegate, answer."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any

import fastapi.openapi.utils
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Match

from weft import __version__
from weft.common.errors import InvalidRequest, MethodNotAllowed, NotFound, WeftError
from weft.front import page
from weft.front.adapter_routes import add_adapters
from weft.front.admin import add_admin
from weft.front.batches.batch_routes import add_batches
from weft.front.batches.file_routes import add_files
from weft.front.batches.service import service_of
from weft.front.health import health_answer, ready_answer
from weft.front.http import answers, docs_page, openapi
from weft.front.http.access import Hosts, key_of
from weft.front.messages.messages_routes import add_messages
from weft.front.middleware import AccessGate, error_answer
from weft.front.model_routes import add_models, card_named, listed_cards
from weft.front.monitoring.load_history import LoadAnswer
from weft.front.monitoring.metrics import CONTENT_TYPE
from weft.front.ollama.ollama_routes import add_ollama
from weft.front.openai.chat_route import add_chat
from weft.front.openai.completions import add_completions
from weft.front.openai.embeddings_route import add_embeddings
from weft.front.openai.scoring_route import add_scoring
from weft.front.requests.context import Front
from weft.front.requests.models.several_models import NotLoaded
from weft.front.responses.routes import add_responses
from weft.front.sleep_routes import add_sleep_routes
from weft.front.small_routes import add_tokenizing
from weft.front.tier_routes import add_tier_routes
from weft.front.tokens.tokens_routes import add_tokens
from weft.front.training_routes import add_training_routes
from weft.front.weight_routes import add_weight_routes

MOST_PARTS = 4
"""Parts of a path that may stand before a known route, for the hint of a 404."""


def build_app(front: Front, hosts: Hosts) -> AccessGate:
    """Return the whole application over ``front``, behind the access checks. ``hosts``: accepted host
    names. Starts the batches, so an event loop must run. Raises ConfigError for an unusable --batch-dir."""
    app = FastAPI(title="Weft", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    add_chat(app, front)
    add_completions(app, front)
    add_embeddings(app, front)
    add_scoring(app, front)
    add_responses(app, front)
    add_tokenizing(app, front)
    add_tokens(app, front)
    add_admin(app, front)
    add_tier_routes(app, front)
    add_training_routes(app, front)
    add_sleep_routes(app, front)
    add_adapters(app, front)
    add_weight_routes(app, front)
    add_models(app, front)
    add_messages(app, front)
    add_ollama(app, front)
    batches = service_of(front)
    add_files(app, front, batches)
    add_batches(app, front, batches)
    if batches is not None:
        batches.start(app)
    _add_models(app, front)
    _add_state(app, front)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(WeftError, functools.partial(_on_weft_error, front))
    app.openapi = lambda: _describe(app, front)  # type: ignore[method-assign]
    return AccessGate(app, front.access, hosts, front.metrics, front.section.root_path or "")


def _add_models(app: FastAPI, front: Front) -> None:
    @app.get("/v1/models", openapi_extra=openapi.returns(answers.ModelList))
    async def list_models(request: Request) -> Response:
        """List all model names for requests, then the LoRA adapters."""
        return _json(answers.ModelList(data=await listed_cards(front, key_of(request.scope))))

    @app.get("/v1/models/{model:path}", openapi_extra=openapi.returns(answers.ModelCard))
    async def get_model(request: Request, model: str) -> Response:
        """Describe a model."""
        return _json(await card_named(front, model, key_of(request.scope)))


def _add_state(app: FastAPI, front: Front) -> None:
    @app.get("/health", openapi_extra=openapi.probes())
    async def health() -> Response:
        """Health: 200 from readiness until the engine is dead for good.

        503 with "starting" while the model loads, and with "dead" at the end. 200 with "alive"; with
        "degraded" while some replica is dead and others serve; with "recovering" while none serves and the
        dead replicas restart, because a restart from outside would only take longer. Draining changes
        nothing. ``missing`` counts the wanted engine processes that are not up, by role.
        """
        return health_answer(front)

    @app.post("/ping", openapi_extra=openapi.probes())
    @app.get("/ping", openapi_extra=openapi.probes())
    async def ping() -> Response:
        """Alias of /health, the name used by SageMaker's probes."""
        return health_answer(front)

    @app.get("/live")
    async def live() -> Response:
        """Liveness: 200 while this process runs, also during load, recovery and drain."""
        return _json({"status": "alive"})

    @app.get("/ready", openapi_extra=openapi.probes())
    async def ready() -> Response:
        """Readiness: 200 after a first generated token, while the engine makes progress.

        200 with "ready". 503 with "paused" during a pause, "stalled" without progress, else with the phase of
        the server. ``missing`` counts the wanted engine processes without progress, by role.
        """
        return ready_answer(front)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the Prometheus metrics."""
        return Response(await front.metrics_page(), media_type=CONTENT_TYPE)

    @app.get("/metrics/history", openapi_extra=openapi.returns(LoadAnswer, 400))
    async def history(request: Request) -> Response:
        """Return the load of the last 10 minutes, one point per second. ``?since=SECOND``: only the points
        after that second."""
        return _json(await front.load_since(_second(request)))

    @app.get("/version")
    async def version() -> Response:
        """Return the server's version."""
        return _json({"version": __version__})

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        """Return a page for a browser: model, load and a chat box."""
        return page.answer()

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """Return this description as a page for a browser."""
        title = front.names[0] if front.several is None else ", ".join(front.several.names)
        return docs_page.answer(app.openapi(), title, request, front.section.root_path or "")


def _second(request: Request) -> int:
    """Return the parameter ``since``; 0 without one. Raises InvalidRequest."""
    given = request.query_params.get("since", "0")
    if not re.fullmatch(r"[0-9]{1,12}", given):
        raise InvalidRequest("since must be a second of an earlier answer", param="since")
    return int(given)


def _json(value: Any, status: int = 200) -> Response:
    return Response(answers.to_json(value), status, media_type="application/json")


async def _on_weft_error(front: Front, request: Request, error: Exception) -> Response:
    """Return the answer for a WeftError of a handler. A 429 takes a position for the retry time."""
    assert isinstance(error, WeftError)
    info = error.info()
    full = info.http_status == 429
    wait = front.retry_after.refused(asyncio.get_running_loop().time()) if full else None
    if isinstance(error, NotLoaded):
        wait = error.wait
    return error_answer(info, request.scope["path"], retry_after=wait)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer the router's own errors: 404 for an unknown route, 405 for a wrong method, 204 for OPTIONS."""
    if not isinstance(error, HTTPException) or error.status_code != 405:
        missing = NotFound(f"there is no such route{_meant(request)}")
        return error_answer(missing.info(), request.scope["path"])
    allow = _allowed(request)
    if request.method == "OPTIONS":
        return Response(status_code=204, headers={"allow": allow})
    refused = MethodNotAllowed(f"this route takes {allow}")
    return error_answer(refused.info(), request.scope["path"], allow)


def _meant(request: Request) -> str:
    """Return a hint with the route that the path would have under another base URL; "" without such a route.

    Clients append their own path to the base URL, so a wrong base gives ``/v1/v1/messages``,
    ``/v1//chat/completions`` or ``/chat/completions``.
    """
    parts = [part for part in request.scope["path"].split("/") if part]
    for first in range(min(len(parts), MOST_PARTS)):
        if first and _routes(request, "/" + "/".join(parts[:first])):
            break  # a path below a known route has the right base
        rest = "/".join(parts[first:])
        for path in (f"/{rest}", f"/v1/{rest}"):
            for route, match in _routes(request, path):
                if match is Match.FULL:
                    known = getattr(route, "path", path)
                    return f": did you mean {known}? Check the base URL of the client"
    return ""


def _routes(request: Request, path: str) -> list[tuple[BaseRoute, Match]]:
    """Return the routes that would match ``path``, also with another method."""
    scope = {**request.scope, "path": path}
    found = [(route, route.matches(scope)[0]) for route in request.app.routes]
    return [(route, match) for route, match in found if match is not Match.NONE]


def _allowed(request: Request) -> str:
    """Return the methods of the request's path, for the header Allow: sorted names with commas."""
    routes = [route for route, _ in _routes(request, request.scope["path"])]
    methods = {"OPTIONS"}.union(*(getattr(route, "methods", ()) for route in routes))
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


def _describe(app: FastAPI, front: Front) -> dict[str, Any]:
    """Return the OpenAPI document, made at the first call."""
    if app.openapi_schema is None:
        made = fastapi.openapi.utils.get_openapi(title=app.title, version=app.version, routes=app.routes)
        if front.section.root_path:
            made["servers"] = [{"url": front.section.root_path}]
        for path in made["paths"].values():
            for operation in path.values():
                # FastAPI's default; this server never answers 422
                operation.get("responses", {}).pop("422", None)
        made.setdefault("components", {})["schemas"] = openapi.components()
        openapi.secure(made, open_paths=front.access.open_paths)
        app.openapi_schema = made
    return app.openapi_schema
