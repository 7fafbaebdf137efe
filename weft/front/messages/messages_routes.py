"""Routes of the Messages API."""

from __future__ import annotations

import functools

from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.log import get_logger
from weft.front.http import openapi
from weft.front.http.answers import to_json
from weft.front.messages import messages_events as e
from weft.front.messages.messages_shape import MessagesShape
from weft.front.protocol.messages.messages_request import CountRequest, MessagesRequest
from weft.front.requests.context import Front
from weft.front.requests.generation import Generation
from weft.front.requests.serving import AnswerShape, handle, read_only

log = get_logger(__name__)


def add_messages(app: FastAPI, front: Front) -> None:
    """Add the routes to ``app``."""

    @app.post(
        "/v1/messages",
        openapi_extra=openapi.generates(
            MessagesRequest,
            e.MessageAnswer,
            "named events from message_start to message_stop",
            error=e.MessagesError,
        ),
    )
    async def create_message(request: Request) -> Response:
        """Answer a conversation, in Anthropic's API."""
        return await handle(front, request, "messages", functools.partial(_shape, front))

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=openapi.answers_of(CountRequest, e.TokenCount, error=e.MessagesError),
    )
    async def count_message_tokens(request: Request) -> Response:
        """Count the tokens of a message's prompt."""
        job = await read_only(front, request, "count")
        count = e.TokenCount(input_tokens=job.prompts[0].count)
        return Response(to_json(count), media_type="application/json")


def _shape(front: Front, generation: Generation) -> AnswerShape:
    """Return the shape of the answer. Logs once per process that attribution lines are dropped."""
    shape = MessagesShape(generation, block=generation.front.cache_block)
    if shape.attribution_moved:
        _log_once(front)
    return shape


@functools.lru_cache(maxsize=1)
def _log_once(front: Front) -> None:
    log.info(
        "/v1/messages drops prompt lines that begin with x-anthropic-billing-header:, because these lines "
        "change with each request and would prevent prefix cache hits; --keep-attribution-lines keeps the "
        "lines"
    )
