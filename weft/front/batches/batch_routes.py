"""Routes of /v1/batches."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.batch.store import BatchRow
from weft.common.errors import InvalidRequest, NotFound, Overloaded
from weft.front.admin import read_body
from weft.front.batches.batch_answers import (
    BatchList,
    BatchObject,
    BatchRequest,
    batch_object,
    limit_of,
    page,
)
from weft.front.batches.file_routes import file_of
from weft.front.batches.service import BatchService, batches_of
from weft.front.http import openapi
from weft.front.http.access import key_of
from weft.front.http.answers import to_json
from weft.front.http.streaming import JSON
from weft.front.requests.context import Front

MOST_LISTED = 100


def add_batches(app: FastAPI, front: Front, service: BatchService | None) -> None:
    """Add the routes. ``service``: None for a server without batches, whose routes answer 404."""

    @app.post("/v1/batches", openapi_extra=openapi.answers_of(BatchRequest, BatchObject))
    async def create_batch(request: Request) -> Response:
        """Begin a batch of the lines of a file."""
        batches = batches_of(service)
        asked = await read_body(front, request, BatchRequest)
        owner = batches.owner(key_of(request.scope))
        file = await file_of(batches, asked.input_file_id, owner, "input_file_id")
        if file.purpose != "batch":
            raise InvalidRequest("input_file_id must be a file with purpose batch", param="input_file_id")
        most = front.section.batch_max_open
        made = await batches.call(batches.store.create, owner, asked.endpoint, file.id, asked.metadata, most)
        if made is None:
            raise Overloaded(
                f"this key has {most} batches that have not ended, the maximum (--batch-max-open); wait "
                "until a batch ends, or cancel a batch"
            )
        return _json(await _batch(batches, made, owner))

    @app.get("/v1/batches", openapi_extra=openapi.returns(BatchList, 400))
    async def list_batches(request: Request, after: str | None = None, limit: str = "20") -> Response:
        """List the batches of the key, newest first."""
        batches = batches_of(service)
        owner = batches.owner(key_of(request.scope))
        found = await batches.call(batches.store.list, owner, after, limit_of(limit, MOST_LISTED))
        if found is None:
            raise InvalidRequest("after must be the id of a batch", param="after")
        rows, more = found
        return _json(BatchList(**page([batch_object(row) for row in rows], more)))

    @app.get("/v1/batches/{batch_id}", openapi_extra=openapi.returns(BatchObject))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Describe a batch."""
        batches = batches_of(service)
        return _json(await _batch(batches, batch_id, batches.owner(key_of(request.scope))))

    @app.post("/v1/batches/{batch_id}/cancel", openapi_extra=openapi.returns(BatchObject, 400))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """Cancel a batch. Finished lines stay, and running lines end."""
        batches = batches_of(service)
        owner = batches.owner(key_of(request.scope))
        row = await _batch(batches, batch_id, owner)
        if not await batches.call(batches.store.cancel, row.id):
            raise InvalidRequest(f"a batch with status {row.status} cannot be cancelled", param="batch_id")
        return _json(await _batch(batches, batch_id, owner))


async def _batch(batches: BatchService, batch: str, owner: str) -> BatchRow:
    """Return a batch of the owner. Raises NotFound."""
    found = await batches.call(batches.store.get, batch, owner)
    if found is None:
        raise NotFound("there is no such batch", param="batch_id")
    return found


def _json(value: Any) -> Response:
    shown = batch_object(value) if isinstance(value, BatchRow) else value
    return Response(to_json(shown), media_type=JSON)
