"""The path that both kinds of completion take: read, prepare in a thread, generate, answer or stream.

The answer's shape is the only difference between them, and is an object (``Shape``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from weft.common.errors import Cancelled, WeftError
from weft.common.log import get_logger
from weft.front.body import read_json
from weft.front.context import Front
from weft.front.generation import Generation, Prompt
from weft.front.metrics import RequestTimes
from weft.front.responses import DONE, Usage, error_response, event, to_json
from weft.front.streaming import COMMENT, EventStream, Silence, watched, within
from weft.text.choice import Delta
from weft.types.sampling import SamplingParams

log = get_logger(__name__)

SEND_GRACE = 5.0
"""Seconds after a request's deadline in which its last event may still be sent."""


class Shape(Protocol):
    """How deltas become JSON. One object a request; the methods are called in this order."""

    def opening(self) -> list[Any]:
        """Chunks before the first delta."""

    def chunks(self, delta: Delta) -> list[Any]:
        """Chunks of one delta."""

    def closing(self, usage: Usage) -> list[Any]:
        """Chunks after the last delta."""

    def whole(self, usage: Usage) -> Any:
        """The answer of a request that is not streamed. The only method called then."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request, read and checked as far as that goes without the engine. Made in a text thread."""

    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    continues: bool
    """Whether the output goes on from the prompt's text."""
    param: str
    """The parameter that the prompt came in."""
    shape: Callable[[Generation], Shape]


async def handle(front: Front, request: Request, prepare: Callable[[Front, bytes], Job]) -> Response:
    """Answers one request. Raises WeftError for what fails before the first byte."""
    times = RequestTimes(front.metrics)
    deadline = asyncio.get_running_loop().time() + front.section.request_timeout
    with contextlib.ExitStack() as held:
        try:
            front.lifecycle.check()
            upload = held.enter_context(front.bodies.upload())
            body = await read_json(request, upload)
            held.enter_context(front.lifecycle.request())
            seed = front.seeds.mint()
            async with within(deadline):
                job = await front.in_thread(prepare, front, body)
            del body
            upload.close()
            generation = Generation(
                front,
                job.prompts,
                job.params,
                continues=job.continues,
                times=times,
                deadline=deadline,
                param=job.param,
                seed=seed,
            )
            held.callback(generation.close)
            shape = job.shape(generation)
            if not job.stream:
                return await _answer(front, request.receive, generation, shape)
            async with watched(request.receive, generation.flow):
                first = await _first(generation)
        except Exception as error:
            times.failed(error.info().code if isinstance(error, WeftError) else "internal_error")
            raise
        events = _events(request.receive, generation, shape, first, times)
        return EventStream(events, deadline + SEND_GRACE, held.pop_all(), generation.flow, front.client)


async def _answer(front: Front, receive: Receive, generation: Generation, shape: Shape) -> Response:
    async with watched(receive, generation.flow):
        while not generation.done:
            await generation.next()

    def body() -> bytes:
        return to_json(shape.whole(generation.usage()))

    params = generation.params
    long = params.logprobs is not None or params.prompt_logprobs is not None
    # Formatting many logprobs takes long enough to be felt by other streams.
    made = await front.in_thread(body) if long else body()
    generation.succeeded()
    return Response(made, media_type="application/json")


async def _first(generation: Generation) -> list[Delta]:
    """The first deltas; so that a request the head refuses gets an HTTP status, not a stream.

    None when it has not refused it, and has not begun it for so long that the stream must begin.
    """
    deltas: list[Delta] = []
    with Silence(generation.flow) as silence:
        while not deltas and not silence.due:
            deltas = await generation.next()
    return deltas


async def _events(
    receive: Receive,
    generation: Generation,
    shape: Shape,
    first: Sequence[Delta],
    times: RequestTimes,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; a failure is its last event."""
    try:
        async with watched(receive, generation.flow):
            with Silence(generation.flow) as silence:
                deltas, opened = first, False
                while True:
                    if deltas and not opened:
                        opened = True
                        for chunk in shape.opening():
                            yield event(chunk)
                    for delta in deltas:
                        for chunk in shape.chunks(delta):
                            yield event(chunk)
                            silence.sent()
                    if generation.done:
                        break
                    deltas = await generation.next()
                    if silence.due:
                        yield COMMENT
                        silence.sent()
            for chunk in shape.closing(generation.usage()):
                yield event(chunk)
            yield DONE
            generation.succeeded()
    except Cancelled as error:
        times.failed(error.info().code)
    except WeftError as error:
        times.failed(error.info().code)
        yield event(error_response(error.info()))
    except Exception:
        log.exception("a stream failed")
        times.failed("internal_error")
        internal = WeftError("the server failed to answer this request")
        yield event(error_response(internal.info()))
