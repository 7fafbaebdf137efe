"""Routes of the Responses API."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest, NotFound, TooLarge
from weft.front.http import openapi
from weft.front.http.access import key_of
from weft.front.http.answers import to_json
from weft.front.http.body import Upload
from weft.front.protocol.responses.protocol import ResponsesRequest, TokensRequest
from weft.front.protocol.responses.read import NONE, line_of, references, with_history
from weft.front.requests.context import Front
from weft.front.requests.generation import Generation
from weft.front.requests.serving import handle, read_only
from weft.front.responses import responses_events as e
from weft.front.responses.response_store import ResponseStore, history
from weft.front.responses.shape import ResponsesShape

MAX_ITEMS = 100
_ELSEWHERE = (
    "; or another API server process has the response: processes of --fronts share no stored responses"
)


def add_responses(app: FastAPI, front: Front) -> None:
    """Add the routes to ``app``."""
    section = front.section
    store = ResponseStore(section.responses_store_bytes, _ELSEWHERE if section.fronts > 1 else "")
    _add_creation(app, front, store)
    _add_stored(app, front, store)


def _add_creation(app: FastAPI, front: Front, store: ResponseStore) -> None:
    @app.post(
        "/v1/responses",
        openapi_extra=openapi.generates(
            ResponsesRequest, e.ResponseAnswer, "named events from response.created to response.completed"
        ),
    )
    async def create_response(request: Request) -> Response:
        """Answer a conversation, in OpenAI's newer API."""
        key = key_of(request.scope)

        def make(generation: Generation) -> ResponsesShape:
            return ResponsesShape(generation, store, key, block=generation.front.cache_block)

        prepare = functools.partial(_prepare, front, store, key)
        return await handle(front, request, "responses", make, prepare)

    @app.post("/v1/responses/input_tokens", openapi_extra=openapi.answers_of(TokensRequest, e.InputTokens))
    async def count_input_tokens(request: Request) -> Response:
        """Count the tokens of a response's prompt."""
        prepare = functools.partial(_prepare, front, store, key_of(request.scope))
        job = await read_only(front, request, "response_tokens", prepare)
        return _json(e.InputTokens(input_tokens=job.prompts[0].count))

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compact_response() -> Response:
        """Refuse the request by name; otherwise "compact" would be taken for a response id."""
        raise NotFound(
            "this server does not compact conversations: send a shorter input", code="unsupported_route"
        )


def _add_stored(app: FastAPI, front: Front, store: ResponseStore) -> None:
    @app.get("/v1/responses/{response_id}", openapi_extra=openapi.returns(e.ResponseAnswer, 400))
    async def get_response(request: Request, response_id: str, stream: str = "false") -> Response:
        """Return a stored response."""
        if stream.lower() not in ("false", "0", ""):
            raise InvalidRequest("stored responses cannot be streamed; leave stream out", param="stream")
        return Response(store.get(response_id, key_of(request.scope)).answer, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", openapi_extra=openapi.returns(e.DeletedResponse))
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a stored response."""
        store.remove(response_id, key_of(request.scope))
        return _json(e.DeletedResponse(id=response_id))

    @app.post("/v1/responses/{response_id}/cancel", openapi_extra=openapi.returns(e.ResponseAnswer, 400))
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Refuse the request: only background responses can be cancelled, and the server makes none."""
        store.get(response_id, key_of(request.scope))
        raise InvalidRequest(
            "only background responses can be cancelled, and this server does not support background: true; "
            "close the connection to cancel a running response",
            param="response_id",
        )

    @app.get("/v1/responses/{response_id}/input_items", openapi_extra=openapi.returns(e.InputItems, 400))
    async def list_input_items(
        request: Request,
        response_id: str,
        order: str = "desc",
        limit: str = "20",
        after: str | None = None,
    ) -> Response:
        """Return the input of a stored response, without the input of previous responses."""
        stored = store.get(response_id, key_of(request.scope))
        return await front.in_thread(
            lambda: _json(_page(msgspec.json.decode(stored.input), order, limit, after))
        )


def _page(items: list[dict[str, Any]], order: str, limit: str, after: str | None) -> e.InputItems:
    """Return one page of ``items``. ``order``: "asc" or "desc". ``limit``: 1 to ``MAX_ITEMS``. ``after``:
    id of the item before the page; None for the first page. Raises InvalidRequest for any other value."""
    # Query parameters arrive as strings and are checked here, for errors in the API's own shape.
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_ITEMS):
        raise InvalidRequest(f"limit must be between 1 and {MAX_ITEMS}", param="limit")
    items = items if order == "asc" else items[::-1]
    if after is not None:
        at = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise InvalidRequest("after must be the id of an input item of this response", param="after")
        items = items[at + 1 :]
    page = items[: int(limit)]
    return e.InputItems(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(page) < len(items),
    )


async def _prepare(
    front: Front, store: ResponseStore, key: int, body: list[bytes], upload: Upload
) -> list[bytes]:
    """Return the payload of a body, with the stored items that the body refers to. The items count as
    ``upload``, too. The used responses are marked as used in ``store``.

    Raises NotFound for a previous response that is not stored, TooLarge (413) if body and items together
    exceed the limit of a body, and Overloaded without memory. Referenced items that are not stored are left
    out here.
    """
    found = await front.in_thread(references, body)
    if found.previous is None and not found.items:
        return with_history(NONE, body)
    chain = [] if found.previous is None else store.chain(found.previous, key)
    owners = store.owners(found.items, key)
    limit = front.section.max_request_bytes
    # A response may be in the chain and also own a referenced item: count each response once.
    stored = sum(one.shown for one in {one.id: one for one in [*chain, *owners]}.values())
    size = sum(map(len, body)) + stored
    if size > limit:
        raise TooLarge(
            f"the request and its stored responses have {size} bytes together; the server's limit is {limit} "
            "(--max-request-bytes): start a new conversation, or send only the items that matter",
            param="previous_response_id" if chain else "input",
        )
    upload.hold(stored)
    line = await front.in_thread(lambda: line_of(history(chain, owners, found.items)))
    return with_history(line, body)


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")
