"""The path that both kinds of completion take: read, submit, generate, answer or stream.

What a client can make large is done off the event loop, in pieces: reading its body (``Front.read``), and
formatting logprobs and long answers.

The answer's shape is the only difference between them, and is an object (``AnswerShape``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from weft.common.errors import Cancelled, DeadlineExceeded, ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.front.access import key_of
from weft.front.answers import Usage
from weft.front.body import Upload, read_json
from weft.front.context import Front
from weft.front.generation import Generation
from weft.front.misses import explains
from weft.front.reading import Job
from weft.front.request_times import RequestTimes
from weft.front.streaming import JSON, EventStream, Silence, StreamForm, watched, within
from weft.text.choice import TextDelta

log = get_logger(__name__)

SEND_GRACE = 5.0
"""Seconds after a request's deadline in which its last event may still be sent."""


HEAVY = 512
"""Logprob candidates that are put into JSON in a thread, rather than between the steps of other streams."""
LONG_ANSWER = 4096
"""Output tokens of an answer that is put into JSON in a thread."""
PIECE = 256 << 10
"""Bytes of a long answer that are made at once."""


class AnswerShape(Protocol):
    """How deltas become JSON. One object a request; the methods are called in this order, from one thread at
    a time. Of an answer that is not streamed only ``take`` and ``whole`` are."""

    @property
    def form(self) -> StreamForm:
        """How its stream is written."""

    def opening(self) -> list[Any]:
        """Chunks before the first delta."""

    def weight(self, delta: TextDelta) -> int:
        """Logprob candidates that the delta's chunks show."""

    def chunks(self, delta: TextDelta) -> list[Any]:
        """Chunks of one delta."""

    def closing(self, usage: Usage) -> list[Any]:
        """Chunks after the last delta."""

    def failed(self, error: ErrorInfo) -> list[Any]:
        """Chunks that end a stream that cannot go on, after any of the others."""

    def take(self, delta: TextDelta) -> None:
        """Notes a delta of an answer that is not streamed."""

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """The JSON of an answer that is not streamed, in pieces."""


Prepare = Callable[[list[bytes], Upload], Awaitable[list[bytes]]]
"""Makes what is read out of a body; more than the body itself counts as its upload, too. Raises WeftError."""


async def _as_it_came(body: list[bytes], upload: Upload) -> list[bytes]:
    return body


async def handle(
    front: Front,
    request: Request,
    kind: str,
    make_shape: Callable[[Generation], AnswerShape],
    prepare: Prepare = _as_it_came,
) -> Response:
    """Answers one request; ``kind`` says how its body is read. Raises WeftError for what fails before the
    first byte."""
    facts = front.facts(kind, request.scope)
    times = RequestTimes(front.metrics, front.trace(kind, request.headers.get("traceparent")), facts)
    deadline = asyncio.get_running_loop().time() + front.section.request_timeout
    with contextlib.ExitStack() as held:
        held.callback(times.close)
        try:
            front.lifecycle.check()
            upload = held.enter_context(front.bodies.upload())
            body = await read_json(request, upload)
            held.enter_context(front.lifecycle.request())
            generation = Generation(front, times=times, deadline=deadline, seed=front.seeds.mint())
            generation.headers = request.headers
            generation.client = key_of(request.scope)
            generation.explain = explains(front.config.cache.explain_cache, request.headers)
            held.callback(generation.close)
            held.callback(lambda: front.access.spend(request.scope, generation.spent()))
            times.mark("body is here")
            images = held.enter_context(front.media.memory.lease(generation.client))
            async with within(deadline):
                made = await prepare(body, upload)
                await front.read(kind, made, generation.build, images, generation.client)
            del body, made  # it may be large, and the answer long
            upload.close()
            generation.submit()
            shape = make_shape(generation)
            if not generation.job.asked.stream:
                return await _answer(front, request.receive, generation, shape, deadline, held)
            async with watched(request.receive, generation.flow):
                first = await _first(generation)
        except Exception as error:
            times.failed(error.info().code if isinstance(error, WeftError) else "internal_error")
            raise
        events = _events(front, request.receive, generation, shape, first, times)
        return EventStream(events, deadline + SEND_GRACE, held.pop_all(), generation.flow, front.links)


async def read_only(front: Front, request: Request, kind: str, prepare: Prepare = _as_it_came) -> Job:
    """Reads a request that nothing is generated for. Raises WeftError."""
    deadline = asyncio.get_running_loop().time() + front.section.request_timeout
    front.lifecycle.check()
    with front.bodies.upload() as upload:
        body = await read_json(request, upload)
        with front.lifecycle.request():
            async with within(deadline):
                made = await prepare(body, upload)
                return await front.read(kind, made, lambda job: job, client=key_of(request.scope))


async def _answer(
    front: Front,
    receive: Receive,
    generation: Generation,
    shape: AnswerShape,
    deadline: float,
    held: contextlib.ExitStack,
) -> Response:
    async with watched(receive, generation.flow):
        while not generation.done:
            for delta in await generation.next():
                shape.take(delta)
    usage = generation.usage()
    pieces = shape.whole(usage)
    if not generation.job.asked.heavy and usage.total_tokens <= LONG_ANSWER:
        made = b"".join(pieces)
        generation.succeeded()
        return Response(made, media_type="application/json")
    return EventStream(
        _pieces(front, generation, pieces),
        deadline + SEND_GRACE,
        held.pop_all(),
        generation.flow,
        front.links,
        JSON,
    )


async def _pieces(
    front: Front, generation: Generation, pieces: Iterator[bytes]
) -> AsyncGenerator[bytes, None]:
    """A long answer: each piece is made when the client has taken the one before."""

    def take() -> bytes:
        made = bytearray()
        while len(made) < PIECE and (piece := next(pieces, b"")):
            made += piece
        return bytes(made)

    while piece := await front.in_thread(take):
        yield piece
    generation.succeeded()


async def _first(generation: Generation) -> list[TextDelta]:
    """The first deltas; so that a request the head refuses gets an HTTP status, not a stream.

    Empty when it has not refused it, and has not begun it for so long that the stream must begin.
    """
    deltas: list[TextDelta] = []
    with Silence(generation.flow) as silence:
        while not deltas and not silence.due:
            deltas = await generation.next()
    return deltas


async def _encode(front: Front, shape: AnswerShape, delta: TextDelta) -> list[bytes]:
    """The events of one delta."""

    def encode() -> list[bytes]:
        return [shape.form.event(chunk) for chunk in shape.chunks(delta)]

    return encode() if shape.weight(delta) < HEAVY else await front.in_thread(encode)


async def _encode_end(front: Front, shape: AnswerShape, usage: Usage) -> list[bytes]:
    """The events behind the last delta: they may repeat the whole answer, and count tokens of its parts."""

    def encode() -> list[bytes]:
        return [shape.form.event(chunk) for chunk in shape.closing(usage)]

    return encode() if usage.total_tokens <= LONG_ANSWER else await front.in_thread(encode)


async def _events(
    front: Front,
    receive: Receive,
    generation: Generation,
    shape: AnswerShape,
    first: Sequence[TextDelta],
    times: RequestTimes,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; a failure is its last event."""
    try:
        async with watched(receive, generation.flow):
            with Silence(generation.flow) as silence:
                deltas = first
                opened = False
                while True:
                    if deltas and not opened:
                        opened = True
                        for chunk in shape.opening():
                            yield shape.form.event(chunk)
                    for delta in deltas:
                        for data in await _encode(front, shape, delta):
                            yield data
                            silence.sent()
                    if generation.done:
                        break
                    deltas = await generation.next()
                    if silence.due:
                        yield shape.form.idle
                        silence.sent()
            for data in await _encode_end(front, shape, generation.usage()):
                yield data
            if shape.form.end:
                yield shape.form.end
            generation.succeeded()
    except GeneratorExit:  # closed before its end: the client did not read it by its deadline
        times.failed(DeadlineExceeded.code)
        raise
    except Cancelled as error:
        times.failed(error.info().code)
    except WeftError as error:
        times.failed(error.info().code)
        for chunk in shape.failed(error.info()):
            yield shape.form.event(chunk)
    except Exception:
        log.exception("a stream failed")
        times.failed("internal_error")
        internal = WeftError("the server failed to answer this request")
        for chunk in shape.failed(internal.info()):
            yield shape.form.event(chunk)
