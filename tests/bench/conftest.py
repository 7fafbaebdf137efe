"""A server on loopback that speaks the streaming protocol with known timing and faults."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.slowness import deadline


class Fake:
    """The behaviour of the server, set by tests, and the received requests."""

    def __init__(self) -> None:
        self.url = ""
        self.first = 0.05
        """Seconds until the first token."""
        self.gap = 0.01
        """Seconds between tokens."""
        self.usage = True
        self.takes_ids = True
        self.chunk_tokens = 1
        self.faults: dict[int, str] = {}
        """Number of a streaming request -> its fault."""
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.clients: set[int] = set()
        """Client ports of generation requests."""
        self.heads: list[str] = []
        """Roles of the engines in its metrics."""
        self.live = 0
        self.most = 0

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake"}]})

    async def metrics(self, request: Request) -> Response:
        lines = [
            f'weft:engine_up{{head="{number}",model_name="fake",role="{role}"}} 1.0'
            for number, role in enumerate(self.heads)
        ]
        return Response(
            "\n".join([*lines, 'weft:engine_up{head="9",model_name="fake",role="decode"} 0.0', ""])
        )

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if isinstance(body.get("prompt"), list) and not self.takes_ids:
            return JSONResponse({"error": {"message": "no ids"}}, 400)
        if not body.get("stream"):
            prompt = body.get("prompt") or body["messages"][0]["content"]
            usage = {"prompt_tokens": 2 * len(prompt.split()) if isinstance(prompt, str) else len(prompt)}
            return JSONResponse({"choices": [{"text": "a"}], "usage": usage})
        assert request.client is not None
        self.clients.add(request.client.port)
        number = len(self.bodies)
        self.bodies.append(body)
        self.times.append(time.monotonic())
        fault = self.faults.get(number, "")
        if fault.isdigit():
            return JSONResponse({"error": {"message": "refused"}}, int(fault))
        return StreamingResponse(self.stream(body, fault), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], fault: str) -> AsyncIterator[bytes]:
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            async for event in self.events(body, fault):
                yield event
        finally:
            self.live -= 1

    async def events(self, body: dict[str, Any], fault: str) -> AsyncIterator[bytes]:
        tokens = body["max_tokens"]
        if fault == "hang":
            await asyncio.sleep(30)
        await asyncio.sleep(self.first)
        for at in range(0, tokens, self.chunk_tokens):
            if at:
                await asyncio.sleep(self.gap)
            if fault == "cut" and at:
                return
            if fault == "error" and at:
                yield event({"error": {"message": "the engine died"}})
                return
            if fault == "garbage":
                yield b"data: {]\n\n"
                return
            last = at + self.chunk_tokens >= tokens
            piece = {"index": 0, "finish_reason": "length" if last else None}
            text = "a" * min(self.chunk_tokens, tokens - at)
            if "messages" in body:
                yield event({"choices": [{**piece, "delta": {"content": text}}]})
            else:
                yield event({"choices": [{**piece, "text": text}]})
        if self.usage:
            yield event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        yield b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@pytest.fixture
def fake() -> Iterator[Fake]:
    found = Fake()
    routes = [
        Route("/metrics", found.metrics),
        Route("/v1/models", found.models),
        Route("/v1/completions", found.generate, methods=["POST"]),
        Route("/v1/chat/completions", found.generate, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until = time.monotonic() + deadline(20)
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        yield found
        server.should_exit = True
        thread.join(deadline(20))
        assert not thread.is_alive()
