"""Routes that load and unload LoRA adapters, and the cards of adapters in /v1/models."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import Forbidden, InvalidRequest
from weft.front.admin import Done, read_body
from weft.front.http import openapi
from weft.front.http.answers import ModelCard, to_json
from weft.front.http.streaming import JSON
from weft.front.protocol.parse import Body
from weft.front.requests.adapters import Adapter
from weft.front.requests.context import Front

MOST_PATH = 4096
"""Maximum characters of a path."""


class LoadLoraRequest(Body, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """Folder with the adapter, on the hosts of the API server and of all engine processes."""
    load_inplace: bool = False
    """True: replace an adapter of the same name. Running requests end with the old adapter."""
    pinned: bool = False
    """True: the adapter keeps its place in the memory of the device."""

    def check(self) -> None:
        """Raise InvalidRequest unless ``lora_path`` is an absolute path."""
        path = self.lora_path
        if not path.startswith("/") or len(path) > MOST_PATH or "\0" in path:
            raise InvalidRequest("lora_path must be an absolute path on the server", param="lora_path")


class UnloadLoraRequest(Body, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """No effect: the number of another server."""


def add_adapters(app: FastAPI, front: Front) -> None:
    """Add the routes."""

    @app.post("/v1/load_lora_adapter", openapi_extra=openapi.answers_of(LoadLoraRequest, Done))
    async def load(request: Request) -> Response:
        """Load a LoRA adapter on all engine processes. The answer comes when the adapter is loaded on all."""
        chosen = _with_adapters(front)
        _check_allowed(chosen)
        asked = await read_body(front, request, LoadLoraRequest)
        made = await chosen.adapters.load(
            asked.lora_name, asked.lora_path, inplace=asked.load_inplace, pinned=asked.pinned
        )
        return _done(f"the adapter {made.name} is loaded")

    @app.post("/v1/unload_lora_adapter", openapi_extra=openapi.answers_of(UnloadLoraRequest, Done))
    async def unload(request: Request) -> Response:
        """Unload a LoRA adapter. Running requests end as started."""
        chosen = _with_adapters(front)
        _check_allowed(chosen)
        asked = await read_body(front, request, UnloadLoraRequest)
        await chosen.adapters.unload(asked.lora_name)
        return _done(f"the adapter {asked.lora_name} is unloaded")


def _with_adapters(front: Front) -> Front:
    """Return the front of the model that takes adapters. Raises InvalidRequest unless exactly one loaded
    model of a server of several models does."""
    if front.several is None:
        return front
    able = [one for one in front.several.fronts if one.config.lora.max_loras]
    if len(able) != 1:
        raise InvalidRequest(
            f"{len(able)} of the loaded models take LoRA adapters, and this route needs exactly one such "
            "model: load or unload models first"
        )
    return able[0]


def _check_allowed(front: Front) -> None:
    """Raise Forbidden for a server that takes no changes of adapters."""
    if not front.config.lora.allow_lora_updates:
        raise Forbidden(
            "this server takes no changes of LoRA adapters; start the server with --allow-lora-updates"
        )


def _done(status: str) -> Response:
    return Response(to_json(Done(status=status)), media_type=JSON)


def cards(front: Front, model: ModelCard) -> list[ModelCard]:
    """Return the cards of all adapters, in order of their load. ``model``: card of the model."""
    return [card_of(front, model, one) for one in front.adapters.listed()]


def card_of(front: Front, model: ModelCard, adapter: Adapter) -> ModelCard:
    """Return the card of an adapter: the card ``model``, with the adapter's name and folder."""
    return ModelCard(
        id=adapter.name,
        created=adapter.created,
        max_model_len=model.max_model_len,
        input_modalities=model.input_modalities,
        parent=model.id,
        root=adapter.folder,
        missing_groups=front.adapters.missing(adapter) or msgspec.UNSET,
    )
