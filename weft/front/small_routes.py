"""Routes without generation: tokenizing."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.front.http import openapi
from weft.front.http.access import key_of
from weft.front.http.body import read_json
from weft.front.http.streaming import JSON, within
from weft.front.requests.context import Front
from weft.front.requests.serving import entered
from weft.front.requests.tokenizing import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest


def add_tokenizing(app: FastAPI, front: Front) -> None:
    """Add ``/tokenize`` and ``/detokenize``."""

    @app.post("/tokenize", openapi_extra=openapi.answers_of(TokenizeRequest, Tokenized))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text, or of a conversation's prompt."""
        return await made(front, request, "tokenize")

    @app.post("/detokenize", openapi_extra=openapi.answers_of(DetokenizeRequest, Detokenized))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        return await made(front, request, "detokenize")


async def made(front: Front, request: Request, kind: str) -> Response:
    """Return an answer made without the engine. ``kind``: one of ``MADE``. Raises WeftError, also when the
    server takes no requests or ``request_timeout`` passes."""
    deadline = asyncio.get_running_loop().time() + front.section.request_timeout
    front.lifecycle.check()
    client = key_of(request.scope)
    with front.bodies.upload() as upload, contextlib.ExitStack() as held:
        body = await read_json(request, upload)
        front = await entered(front, body, request, held)
        async with within(deadline):
            answer = await front.made(kind, body, client)
    return Response(answer, media_type=JSON)
