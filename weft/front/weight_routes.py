"""Routes that change the weights of a running model, with vLLM's names and bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import ErrorInfo, InvalidRequest, ReportedError, WeftError
from weft.front.admin import chosen, read_body
from weft.front.http import openapi
from weft.front.http.answers import to_json
from weft.front.http.streaming import JSON
from weft.front.protocol.parse import Body
from weft.front.requests.context import Front
from weft.front.requests.weight_updates import WeightUpdates
from weft.store.announced import PACKING, packing_of, read_group, read_tensors
from weft.store.new_weights import source_files

MOST_LABEL = 256
"""Maximum characters of a label."""
MOST_PATH = 4096
ABORT_S = 2.0
"""Maximum seconds to wait for the end of requests that ``--on-update abort`` aborts."""
CARRY_S = 1200.0
"""Maximum seconds of one call from another API server to the API server that carries out updates."""
BACKENDS = ("file", "shm")
"""Backends without a set-up."""
GROUPS = ("gloo", "nccl", "ipc")
"""Backends with receivers."""
_GROUP_FIELDS = ("master_address", "master_port", "rank_offset", "world_size", "timeout", *PACKING)
_TENSOR_FIELDS = ("names", "dtype_names", "shapes", "digests", "ipc_handles", "ipc_handles_pickled", *PACKING)


class InitRequest(Body, frozen=True, kw_only=True):
    """POST /init_weight_transfer_engine."""

    model: str = ""
    """Name of the model, in a server of several models."""
    init_info: dict[str, Any] = msgspec.field(default_factory=dict)
    """``backend``: "file", "shm", "gloo", "nccl" or "ipc". Without ``backend``, ``master_address`` means a
    group of the trainer, over nccl on a GPU and over gloo on a CPU. Fields of a group: ``master_address``,
    ``master_port``, ``rank_offset``, ``world_size``, ``timeout`` in seconds, and the fields of packing."""


class StartRequest(Body, frozen=True, kw_only=True):
    """POST /start_weight_update."""

    model: str = ""
    is_checkpoint_format: bool = True
    """Only True: names and shapes are those of the checkpoint."""


class UpdateRequest(Body, frozen=True, kw_only=True):
    """POST /update_weights."""

    model: str = ""
    update_info: dict[str, Any]
    """``path``: absolute path of a folder of safetensors, ``name``: a safetensors file in /dev/shm, or
    ``names``, ``dtype_names`` and ``shapes``: tensors that the trainer broadcasts now, with ``packed`` and
    ``digests`` (CRC-32), or that ``ipc_handles`` name. ``partial``: True if some tensors only are given."""


class FinishRequest(Body, frozen=True, kw_only=True):
    """POST /finish_weight_update."""

    model: str = ""
    weight_version: str | None = None
    """Label of the new version; null for its number."""


class VersionRequest(Body, frozen=True, kw_only=True):
    """POST /update_weight_version."""

    model: str = ""
    new_version: str


class UpdateAnswer(msgspec.Struct, kw_only=True):
    """Answer of the routes of an update."""

    message: str


class VersionAnswer(msgspec.Struct, kw_only=True):
    """Answer of POST /update_weight_version."""

    success: bool
    new_version: str


class WeightInfo(msgspec.Struct, kw_only=True):
    """Answer of GET /weight_info."""

    weight_version: str
    version: int
    """Number of updates since the start."""


class WorldSize(msgspec.Struct, kw_only=True):
    """Answer of GET /get_world_size."""

    world_size: int


class _Carried(msgspec.Struct, kw_only=True):
    """Answer to a call of another API server."""

    error: ErrorInfo | None = None


class ServedModel(msgspec.Struct, kw_only=True):
    """The model of a server."""

    model: str
    """Folder of the checkpoint."""
    dtype: str
    """dtype of activations and plain weights, as torch prints the dtype: "torch.bfloat16"."""
    max_model_len: int


class ServedParallel(msgspec.Struct, kw_only=True):
    """Sizes of the parallel groups."""

    tensor_parallel_size: int
    data_parallel_size: int


class ServedLora(msgspec.Struct, kw_only=True):
    """Places for adapters."""

    max_lora_rank: int
    max_loras: int


class ServerConfig(msgspec.Struct, kw_only=True):
    """Settings of a server that trainers read."""

    model_config: ServedModel
    parallel_config: ServedParallel
    lora_config: ServedLora | None
    """null for a server that takes no adapters over HTTP."""


class ServerInfo(msgspec.Struct, kw_only=True):
    """Answer of GET /server_info."""

    vllm_config: ServerConfig


def add_weight_routes(app: FastAPI, front: Front) -> None:
    """Add the routes."""
    _add_facts(app, front)
    if front.siblings is not None:
        front.siblings.carry = lambda call: _carried(front, call)
        front.siblings.leave = lambda model: _end_all(front, model)

    @app.post("/init_weight_transfer_engine", openapi_extra=openapi.answers_of(InitRequest, UpdateAnswer))
    async def init(request: Request) -> Response:
        """Set up the transport of new weights. Files and shared memory need no set-up. If a trainer
        broadcasts, every rank joins the group of the trainer. The answer comes when the group is formed.
        """
        await _carry(front, request, await read_body(front, request, InitRequest))
        return _json(UpdateAnswer(message="Weight transfer initialized"))

    @app.post("/start_weight_update", openapi_extra=openapi.answers_of(StartRequest, UpdateAnswer))
    async def start(request: Request) -> Response:
        """Begin an update. Replaces an update that was not finished."""
        await _carry(front, request, await _body(front, request, StartRequest))
        return _json(UpdateAnswer(message="Weight update started"))

    @app.post("/update_weights", openapi_extra=openapi.answers_of(UpdateRequest, UpdateAnswer))
    async def update(request: Request) -> Response:
        """Add a source of tensors to the update. Engines read files when the update is finished. Broadcasts
        are received now: the answer comes when all ranks have the tensors.
        """
        await _carry(front, request, await read_body(front, request, UpdateRequest))
        return _json(UpdateAnswer(message="Weights updated"))

    @app.post("/finish_weight_update", openapi_extra=openapi.answers_of(FinishRequest, UpdateAnswer))
    async def finish(request: Request) -> Response:
        """Read all sources on all engine processes, then change the weights between two steps.

        400 names a tensor that does not fit; the old weights then stay.
        """
        await _carry(front, request, await _body(front, request, FinishRequest))
        return _json(UpdateAnswer(message="Weight update finished"))

    @app.post("/update_weight_version", openapi_extra=openapi.answers_of(VersionRequest, VersionAnswer))
    async def rename(request: Request) -> Response:
        """Change the label of the weights in use."""
        asked = await read_body(front, request, VersionRequest)
        await _carry(front, request, asked)
        return _json(VersionAnswer(success=True, new_version=asked.new_version))


# ---- the calls, on the API server that carries out the updates


async def _init(front: Front, asked: InitRequest) -> None:
    """Check ``init_info``, and form the group of a trainer. Raises InvalidRequest, and Unavailable for a
    trainer that does not join."""
    updates, info = _updates(front, asked.model), asked.init_info
    backend = info.get("backend", "group" if "master_address" in info else "file")
    if backend in BACKENDS:
        _only(info, ("backend",), "init_info")
    elif backend in GROUPS or "backend" not in info:
        _only(info, ("backend", *_GROUP_FIELDS), "init_info")
        packing_of(info, "init_info")
        device = chosen(front, asked.model).config.device
        await updates.join(*read_group(info, device, updates.ranks))
        updates.packing = {key: info[key] for key in PACKING if key in info}
    else:
        raise InvalidRequest(f"backend must be one of {', '.join((*BACKENDS, *GROUPS))}", param="init_info")


async def _start(front: Front, asked: StartRequest) -> None:
    if not asked.is_checkpoint_format:
        raise InvalidRequest("is_checkpoint_format must be true", param="is_checkpoint_format")
    _updates(front, asked.model).start()


async def _update(front: Front, asked: UpdateRequest) -> None:
    updates, info = _updates(front, asked.model), asked.update_info
    if "names" in info:
        _only(info, (*_TENSOR_FIELDS, "partial"), "update_info")
        await updates.receive(read_tensors(info, updates.packing), _partial(info))
    else:
        updates.add(_source(info), _partial(info))


async def _finish(front: Front, asked: FinishRequest) -> None:
    if asked.weight_version is not None:
        _check_label(asked.weight_version, "weight_version")
    ending = chosen(front, asked.model).config.scheduler.on_update == "abort"
    leave = (lambda: _leave(front, asked.model)) if ending else None
    await _updates(front, asked.model).finish(asked.weight_version, lambda: front.pausing.paused, leave)
    if front.several is not None:
        await front.several.updated(asked.model)


async def _rename(front: Front, asked: VersionRequest) -> None:
    _check_label(asked.new_version, "new_version")
    await _updates(front, asked.model).rename(asked.new_version)


_CALLS: dict[str, tuple[type[Body], Callable[[Front, Any], Awaitable[None]]]] = {
    "init": (InitRequest, _init),
    "start": (StartRequest, _start),
    "update": (UpdateRequest, _update),
    "finish": (FinishRequest, _finish),
    "rename": (VersionRequest, _rename),
}


async def _carry(front: Front, request: Request, asked: Body) -> None:
    """Carry out a call on the API server that carries out updates. ``?model=`` replaces an empty field.
    Raise the errors of the call, and Unavailable if the other API server does not answer."""
    if not getattr(asked, "model", "") and (model := request.query_params.get("model")):
        asked = msgspec.structs.replace(asked, model=model)
    name, run = next((name, run) for name, (kind, run) in _CALLS.items() if isinstance(asked, kind))
    siblings = front.siblings
    if siblings is None or (carrier := await siblings.carrier()) == siblings.name:
        await run(front, asked)
        return
    call = f"{name} {msgspec.json.encode(asked).decode()}"
    answer = msgspec.json.decode(await siblings.ask_carrier(carrier, call, CARRY_S), type=_Carried)
    if answer.error is not None:
        raise ReportedError(answer.error)


async def _carried(front: Front, call: str) -> bytes:
    """Carry out a call for another API server, and return the answer."""
    name, _, body = call.partition(" ")
    kind, run = _CALLS[name]
    try:
        await run(front, msgspec.json.decode(body, type=kind))
        return msgspec.json.encode(_Carried())
    except WeftError as error:
        return msgspec.json.encode(_Carried(error=error.info()))


async def _leave(front: Front, model: str) -> None:
    """End all requests of a model, at every API server, with the tokens so far. Waits at most ``ABORT_S`` for
    clients that do not read."""
    # The full name: an empty name is ambiguous at another API server with several loaded models.
    name = chosen(front, model).names[0]
    others = [] if front.siblings is None else [front.siblings.tell_leave(name, 2 * ABORT_S)]
    await asyncio.gather(_end_all(front, name), *others)


async def _end_all(front: Front, model: str) -> None:
    """End all requests of a model at this API server, see ``_leave``."""
    served = chosen(front, model).model
    ended = {name: one for name, one in front.running.items() if one.front.model is served}
    for generation in ended.values():
        generation.abort()
    until = asyncio.get_running_loop().time() + ABORT_S
    while ended.keys() & front.running.keys():
        if asyncio.get_running_loop().time() > until:
            return
        await asyncio.sleep(0.01)


def _add_facts(app: FastAPI, front: Front) -> None:
    """Add the routes that change no weights."""

    @app.get("/get_world_size", openapi_extra=openapi.returns(WorldSize))
    async def get_world_size(request: Request) -> Response:
        """Return the number of ranks of all groups. ``?include_dp=false`` counts one replica only."""
        named = chosen(front, request.query_params.get("model", ""))
        one = request.query_params.get("include_dp", "true").lower() in ("false", "0")
        ranks = named.config.parallel.tensor_parallel_size if one else named.model.weights.ranks
        return _json(WorldSize(world_size=ranks))

    @app.get("/server_info", openapi_extra=openapi.returns(ServerInfo))
    async def server_info(request: Request) -> Response:
        """Return the settings that trainers read, in the form of vLLM. ``?model=`` names one of several
        models. The rest of the query has no effect."""
        chosen_front = chosen(front, request.query_params.get("model", ""))
        return _json(ServerInfo(vllm_config=_config(chosen_front)))

    @app.get("/weight_info", openapi_extra=openapi.returns(WeightInfo))
    async def weight_info(request: Request) -> Response:
        """Return the label of the weights that new requests use. ``?model=`` names one of several models."""
        updates = _updates(front, request.query_params.get("model", ""))
        return _json(WeightInfo(weight_version=updates.label, version=updates.number))


def _config(front: Front) -> ServerConfig:
    config = front.config
    parallel, lora = config.parallel, config.lora
    return ServerConfig(
        model_config=ServedModel(
            model=config.model_path,
            dtype=f"torch.{config.dtype}",
            max_model_len=config.kv.max_model_len,
        ),
        parallel_config=ServedParallel(
            tensor_parallel_size=parallel.tensor_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
        ),
        lora_config=ServedLora(max_lora_rank=lora.max_lora_rank, max_loras=lora.max_loras)
        if lora.allow_lora_updates
        else None,
    )


async def _body(front: Front, request: Request, form: Any) -> Any:
    """Return the body, which is optional."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return form()
    return await read_body(front, request, form)


def _updates(front: Front, model: str) -> WeightUpdates:
    """Return the weights of a loaded model; "" for the only model. Raises the errors of ``chosen``."""
    return chosen(front, model).model.weights


def _source(info: dict[str, Any]) -> tuple[str, ...]:
    """Return the files of ``update_info``. Raises InvalidRequest."""
    _only(info, ("path", "name", "partial"), "update_info")
    path, name = info.get("path"), info.get("name")
    if (path is None) == (name is None):
        raise InvalidRequest(
            "update_info must have path (a folder of safetensors, or a GGUF file), name (a file in "
            "/dev/shm), or names with dtype_names and shapes (tensors of a trainer's group)",
            param="update_info",
        )
    place = path if path is not None else name
    if not isinstance(place, str) or not 0 < len(place) <= MOST_PATH:
        raise InvalidRequest("path and name must be text", param="update_info")
    return source_files("file" if path is not None else "shm", place)


def _partial(info: dict[str, Any]) -> bool:
    """Return True if ``update_info`` has some tensors only. Raises InvalidRequest."""
    partial = info.get("partial", False)
    if not isinstance(partial, bool):
        raise InvalidRequest("partial must be true or false", param="update_info")
    return partial


def _only(info: dict[str, Any], known: tuple[str, ...], param: str) -> None:
    unknown = sorted(info.keys() - set(known))
    if unknown:
        raise InvalidRequest(f"{param} has an unknown field: {unknown[0][:80]}", param=param)


def _check_label(label: str, param: str) -> None:
    if not 0 < len(label) <= MOST_LABEL or not label.isprintable():
        raise InvalidRequest(f"{param} must have 1 to {MOST_LABEL} printable characters", param=param)


def _json(answer: msgspec.Struct) -> Response:
    return Response(to_json(answer), media_type=JSON)
