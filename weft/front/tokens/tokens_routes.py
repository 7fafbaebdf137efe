"""POST /inference/v1/generate, and the routes that render requests to token ids."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.front.http import openapi
from weft.front.protocol.chat_request import ChatRequest
from weft.front.protocol.completions_request import CompletionRequest
from weft.front.protocol.sequence_request import SequenceRequest
from weft.front.protocol.tokens_request import GenerateRequest
from weft.front.requests.context import Front
from weft.front.requests.read_tokens import Rendered
from weft.front.requests.serving import handle
from weft.front.small_routes import made
from weft.front.tokens.sequence_shape import SequenceLogprobs, SequenceShape
from weft.front.tokens.tokens_shape import TokensAnswer, TokensChunk, TokensShape


def add_tokens(app: FastAPI, front: Front) -> None:
    """Add the routes to ``app``."""

    @app.post(
        "/inference/v1/generate",
        openapi_extra=openapi.generates(GenerateRequest, TokensAnswer, TokensChunk),
    )
    async def generate(request: Request) -> Response:
        """Continue a prompt of token ids, and answer with token ids."""
        return await handle(front, request, "generate", TokensShape)

    @app.post("/get_sequence_logprobs", include_in_schema=False)
    @app.post("/get_sequence_logprobs/", openapi_extra=openapi.answers_of(SequenceRequest, SequenceLogprobs))
    async def get_sequence_logprobs(request: Request) -> Response:
        """Return the logprobs of the tokens behind each prompt. Nothing is generated."""
        return await handle(front, request, "sequence_logprobs", SequenceShape)

    @app.post("/v1/chat/completions/render", openapi_extra=openapi.answers_of(ChatRequest, Rendered))
    async def render_chat(request: Request) -> Response:
        """Return a chat request as a request with token ids, without an answer of the model."""
        return await made(front, request, "chat_render")

    @app.post("/v1/completions/render", openapi_extra=_many(openapi.answers_of(CompletionRequest, Rendered)))
    async def render_completions(request: Request) -> Response:
        """Return a completions request as requests with token ids, one per prompt."""
        return await made(front, request, "completions_render")


def _many(described: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a route whose answer is an array of the described objects."""
    content = described["responses"]["200"]["content"]["application/json"]
    content["schema"] = {"type": "array", "items": content["schema"]}
    return described
