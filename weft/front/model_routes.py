"""Cards of all models, and the routes that load, unload and pin models.

For other modules of the front: ``statuses``, ``load_model``, ``unload_model`` and ``pin_model`` work for
servers of one and of several models.
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest, NotFound
from weft.common.log import get_logger
from weft.config.sizing.model_cost import model_cost
from weft.front.adapter_routes import card_of, cards
from weft.front.admin import read_body
from weft.front.http import openapi
from weft.front.http.answers import ModelCard, to_json
from weft.front.http.streaming import JSON
from weft.front.protocol.parse import Body
from weft.front.requests.context import Front
from weft.front.requests.model_files import changed_at
from weft.front.requests.models.named_model import seconds_of
from weft.front.requests.models.several_models import ModelStatus

log = get_logger(__name__)


class ModelRequest(Body, frozen=True, kw_only=True):
    """POST /admin/models/unload."""

    model: str
    """Name of the model."""


class LoadModelRequest(Body, frozen=True, kw_only=True):
    """POST /admin/models/load."""

    model: str
    """Name of the model."""
    keep_alive: int | float | str | None = None
    """Seconds without a request until the unload, or a text such as 5m. Negative: never."""


class PinModelRequest(Body, frozen=True, kw_only=True):
    """POST /admin/models/pin."""

    model: str
    """Name of the model."""
    pinned: bool = True
    """True: only an operator unloads the model."""


class ModelStatuses(msgspec.Struct, kw_only=True):
    """Answer of GET /admin/models."""

    models: list[ModelStatus]


async def _times(front: Front) -> dict[str, int]:
    """Return ``changed_at`` of all models, read in a thread: a slow disk holds up no other request."""
    paths = [front.config.model_path] if front.several is None else front.several.paths
    return await front.in_thread(changed_at, paths)


async def listed_cards(front: Front, client: int) -> list[ModelCard]:
    """Return the cards of all models for an API key, then of their LoRA adapters. ``client``: number of the
    key."""
    times = await _times(front)
    if front.several is None:
        own = [front.card(name, times) for name in front.names]
        return [*own, *cards(front, own[0])]
    own = [front.several.card(name, times) for name in front.several.shown(client)]
    by_name = {one.id: one for one in own}
    loaded = [one for one in front.several.fronts if one.names[0] in by_name]
    return [*own, *(card for one in loaded for card in cards(one, by_name[one.names[0]]))]


async def card_named(front: Front, model: str, client: int) -> ModelCard:
    """Return the card of one model or LoRA adapter. Raises NotFound for an unknown name, and for an adapter
    that is not loaded."""
    times = await _times(front)
    several = front.several
    if several is not None:
        holder = several.named(model, client)
        if holder is None:
            return several.card(model, times)
        front = holder
    front.check_model(model)
    if front.adapters.unloaded(model):
        raise NotFound("the adapter is not loaded: a request for the adapter loads it", param="model")
    adapter = front.adapters.find(model)
    if adapter is None:
        return front.card(model, times)
    return card_of(front, front.card(front.names[0], times), adapter)


# -- for operators


def statuses(front: Front) -> list[ModelStatus]:
    """Return the state of all models. The model of a server of one model is always loaded and pinned."""
    if front.several is not None:
        return front.several.listed()
    config = front.config
    return [
        ModelStatus(
            name=config.served_names[0],
            aliases=(*config.served_names[1:], *config.accepted_names),
            state="loaded",
            size=model_cost([config]),
            pinned=True,
            running=front.lifecycle.active,
            waiting=0,
        )
    ]


async def load_model(front: Front, model: str) -> ModelStatus:
    """Load a model, and return the state of the loaded model. Raises WeftError."""
    if front.several is not None:
        return await front.several.load(model)
    front.check_model(model)
    return statuses(front)[0]


async def unload_model(front: Front, model: str) -> ModelStatus:
    """Unload a model after its running requests. Return its present state. Raises NotFound, and
    InvalidRequest for a server of one model."""
    if front.several is not None:
        return await front.several.unload(model)
    front.check_model(model)
    raise InvalidRequest("a server of one model keeps the model loaded; /admin/drain ends the server")


async def pin_model(front: Front, model: str, pinned: bool) -> ModelStatus:
    """Pin or unpin a model. Return its present state. Raises NotFound, and InvalidRequest for the unpin of
    the only model of a server."""
    if front.several is not None:
        return await front.several.pin(model, pinned)
    front.check_model(model)
    if not pinned:
        raise InvalidRequest("a server of one model keeps the model loaded", param="pinned")
    return statuses(front)[0]


def add_models(app: FastAPI, front: Front) -> None:
    """Add the routes."""

    @app.get("/admin/models", openapi_extra=openapi.returns(ModelStatuses))
    async def models() -> Response:
        """List all models with state, size and use."""
        return _json(ModelStatuses(models=statuses(front)))

    @app.post("/admin/models/load", openapi_extra=openapi.answers_of(LoadModelRequest, ModelStatus))
    async def load(request: Request) -> Response:
        """Load a model. The answer comes when the model is loaded.

        404 for an unknown name; 503 if the model cannot be loaded within --model-timeout.
        """
        asked = await read_body(front, request, LoadModelRequest)
        keep = None if asked.keep_alive is None else seconds_of(asked.keep_alive)
        log.info("load of the model %s requested by an operator", asked.model)
        status = await load_model(front, asked.model)
        if keep is not None and front.several is not None:
            status = await front.several.keep(asked.model, keep)
        return _json(status)

    @app.post("/admin/models/unload", openapi_extra=openapi.answers_of(ModelRequest, ModelStatus))
    async def unload(request: Request) -> Response:
        """Unload a model, also a pinned one. Running requests end first; new requests load the model again.

        404 for an unknown name; 400 for a server of one model.
        """
        asked = await read_body(front, request, ModelRequest)
        log.info("unload of the model %s requested by an operator", asked.model)
        return _json(await unload_model(front, asked.model))

    @app.post("/admin/models/pin", openapi_extra=openapi.answers_of(PinModelRequest, ModelStatus))
    async def pin(request: Request) -> Response:
        """Pin or unpin a model. Neither an idle time nor the load of another model unloads a pinned model."""
        asked = await read_body(front, request, PinModelRequest)
        return _json(await pin_model(front, asked.model, asked.pinned))


def _json(value: object) -> Response:
    return Response(to_json(value), media_type=JSON)
