"""Common path of all generating routes: read, submit, generate, answer or stream.

Work of a size chosen by the client runs off the event loop, in pieces: reading the body (``Front.read``),
and formatting logprobs and long answers.

Routes differ only in the shape of the answer, an object (``AnswerShape``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from weft.common.errors import Cancelled, DeadlineExceeded, ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.front.http.access import key_of
from weft.front.http.answers import Usage, explains
from weft.front.http.body import Upload, read_json
from weft.front.http.direct import DIRECT, DirectWriter
from weft.front.http.streaming import (
    JSON,
    EventStream,
    Silence,
    StreamForm,
    unless_gone,
    watched,
    within,
)
from weft.front.monitoring.request_times import RequestTimes
from weft.front.requests.batch_generation import SHARE, generation_of, times_of
from weft.front.requests.context import Front
from weft.front.requests.generation import Generation, Show
from weft.front.requests.reading import Job
from weft.text.choice import TextDelta

log = get_logger(__name__)

SEND_GRACE = 5.0
"""Seconds after a request's deadline in which the last event may still be sent."""


HEAVY = 512
"""Number of logprob candidates from which JSON is made in a thread, not between the steps of other
streams."""
LONG_ANSWER = 4096
"""Number of tokens, prompt included, from which an answer's JSON is made in a thread."""
PIECE = 256 << 10
"""Minimum bytes of a long answer that are made at once."""


class AnswerShape(Protocol):
    """Conversion of deltas to JSON; one object per request. Calls come in the order below, from one thread
    at a time. An answer that is not streamed uses only ``take`` and ``whole``."""

    @property
    def form(self) -> StreamForm:
        """Format of the stream."""

    def opening(self) -> list[Any]:
        """Return the chunks before the first delta."""

    def weight(self, delta: TextDelta) -> int:
        """Return the number of logprob candidates in the delta's chunks."""

    def chunks(self, delta: TextDelta) -> list[Any]:
        """Return the chunks of one delta."""

    def events(self, delta: TextDelta) -> list[bytes]:
        """Return the chunks of one delta as events. A shape may have a shorter way for frequent events."""
        return [self.form.event(chunk) for chunk in self.chunks(delta)]

    def closing(self, usage: Usage) -> list[Any]:
        """Return the chunks after the last delta."""

    def failed(self, error: ErrorInfo) -> list[Any]:
        """Return the chunks that end a failed stream. May follow any other call."""

    def take(self, delta: TextDelta) -> None:
        """Record a delta of an answer that is not streamed."""

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the JSON of an answer that is not streamed, in pieces."""


Prepare = Callable[[list[bytes], Upload], Awaitable[list[bytes]]]
"""Returns the bytes to read for a body, e.g. with stored items in front. The additional bytes count as part
of the upload. Raises WeftError, or Answered."""


class Answered(Exception):
    """A request that needs no engine has its answer."""

    def __init__(self, response: Response) -> None:
        self.response = response


Early = Callable[[list[bytes], int], Awaitable[None]]
"""Called with a body and the number of the API key, before the request waits for its model. Raises WeftError
to refuse the request, or Answered to answer the request."""


async def _no_early_answer(body: list[bytes], client: int) -> None:
    pass


async def _as_it_came(body: list[bytes], upload: Upload) -> list[bytes]:
    return body


async def handle(
    front: Front,
    request: Request,
    kind: str,
    make_shape: Callable[[Generation], AnswerShape],
    prepare: Prepare = _as_it_came,
    early: Early = _no_early_answer,
) -> Response:
    """Answer one request; ``kind`` selects the reader, ``make_shape`` the form of the answer, ``prepare``
    may change the body, ``early`` may answer before the request waits for its model. The request's tokens
    count against the rate limit of the key, and the outcome is recorded in metrics, log and trace. Raises
    WeftError for a failure before the first byte of the answer."""
    times = times_of(front, kind, request.scope, request.headers.get("traceparent"))
    deadline = asyncio.get_running_loop().time() + front.section.request_timeout
    # `held` releases in reverse order. A stream takes over all resources with `pop_all`.
    with contextlib.ExitStack() as held:
        held.callback(times.close)
        try:
            front.lifecycle.check()
            upload = held.enter_context(front.bodies.upload())
            body = await read_json(request, upload)
            await early(body, key_of(request.scope))
            front = await entered(front, body, request, held)
            times.of(front.metrics)
            generation = generation_of(front, request.scope, times, deadline)
            generation.headers = request.headers
            generation.client = key_of(request.scope)
            generation.explain = explains(front.config.cache.explain_cache, request.headers)
            held.callback(generation.close)
            if SHARE not in request.scope:  # the limits per minute are for online requests
                held.callback(lambda: front.access.spend(request.scope, generation.spent()))
            times.mark("body is here")
            images = held.enter_context(front.media.memory.lease(generation.client))
            async with within(deadline):
                made = await prepare(body, upload)
                parts = (kind, made, generation.build, images, generation.client)
                await front.adapters.resolved(functools.partial(front.read, *parts))
            del body, made, parts  # body and answer may be large
            upload.close()
            generation.submit()
            shape = make_shape(generation)
            if not generation.job.asked.stream:
                return await _answer(front, request.receive, generation, shape, deadline, held)
            async with watched(request.receive, generation.flow):
                first = await _first(generation)
        except Answered as found:
            return found.response
        except Exception as error:
            times.failed(error.info().code if isinstance(error, WeftError) else "internal_error")
            raise
        direct = request.scope.get(DIRECT)
        events = _events(front, request.receive, generation, shape, first, times, direct)
        return EventStream(
            events,
            deadline + SEND_GRACE,
            held.pop_all(),
            generation.flow,
            front.links,
            shape.form.media_type,
        )


async def entered(front: Front, body: list[bytes], request: Request, held: contextlib.ExitStack) -> Front:
    """Return the front of the model, see ``Front.enter``. Raises Cancelled if the client disconnects while
    the request waits for the model."""
    work = front.enter(body, key_of(request.scope), held, line=SHARE in request.scope)
    return await (work if front.several is None else unless_gone(request.receive, work))


async def read_only(front: Front, request: Request, kind: str, prepare: Prepare = _as_it_came) -> Job:
    """Read a request without generation and return the job.

    ``kind``: the endpoint's kind of request. ``prepare``: changes the body before the reading. Raises
    WeftError, also when the server takes no requests or ``request_timeout`` passes.
    """
    deadline = asyncio.get_running_loop().time() + front.section.request_timeout
    front.lifecycle.check()
    client = key_of(request.scope)
    with front.bodies.upload() as upload, contextlib.ExitStack() as held:
        body = await read_json(request, upload)
        front = await entered(front, body, request, held)
        async with within(deadline):
            made = await prepare(body, upload)
            return await front.read(kind, made, lambda job: job, client=client)


async def _answer(
    front: Front,
    receive: Receive,
    generation: Generation,
    shape: AnswerShape,
    deadline: float,
    held: contextlib.ExitStack,
) -> Response:
    """Generate all choices and return the whole answer. A long answer is streamed in pieces and takes over
    the resources in ``held``. Raises WeftError for a failed request."""
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
    """Yield a long answer. Each piece is made, in a thread, after the client took the previous piece.

    Record the success of ``generation`` after the last piece. A client that leaves earlier is no success.
    """

    def take() -> bytes:
        made = bytearray()
        # A single piece may be empty. Only the end of the pieces ends the answer.
        while len(made) < PIECE and (piece := next(pieces, None)) is not None:
            made += piece
        return bytes(made)

    while piece := await front.in_thread(take):
        yield piece
    generation.succeeded()


async def _first(generation: Generation) -> list[TextDelta]:
    """Wait for the first deltas and return them. So a request refused by the engine gets an HTTP error, not
    a stream. Raises the WeftError of a refused request.

    Return an empty list if the engine has not answered for so long that the stream must begin.
    """
    deltas: list[TextDelta] = []
    with Silence(generation.flow) as silence:
        while not deltas and not silence.due:
            deltas = await generation.next()
    return deltas


async def _encode(front: Front, shape: AnswerShape, delta: TextDelta) -> list[bytes]:
    """Return the events of one delta as bytes. Many logprobs are encoded in a thread."""

    if shape.weight(delta) < HEAVY:
        return shape.events(delta)
    return await front.in_thread(functools.partial(shape.events, delta))


def _shown(shape: AnswerShape, silence: Silence, direct: DirectWriter) -> Show:
    """Return a function that writes the events of deltas to the connection at once. The function shows
    nothing if the client does not read, or if the events must be encoded in a thread."""

    def show(deltas: list[TextDelta]) -> bool:
        if not direct.ready:
            return False
        for delta in deltas:
            if delta.finish_reason is not None or shape.weight(delta) >= HEAVY:
                return False
        made: list[bytes] = []
        try:
            for delta in deltas:
                made += shape.events(delta)
        finally:  # the events before an error are sent, too
            if made:
                direct.write(made[0] if len(made) == 1 else b"".join(made))
                silence.sent()
        return True

    return show


async def _encode_end(front: Front, shape: AnswerShape, usage: Usage) -> list[bytes]:
    """Return the events after the last delta as bytes. The events may repeat the whole answer and count
    tokens of parts, so long answers are encoded in a thread."""

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
    direct: DirectWriter | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, ``first`` included, with keep-alive comments. A failure becomes the
    last event, and nothing is raised; a disconnected client gets nothing more. The outcome is recorded in
    ``times``.

    ``direct``: takes events at once, in place of a yield, while this generator waits for events. All bytes
    yielded before have been sent by then."""
    try:
        async with watched(receive, generation.flow):
            with Silence(generation.flow) as silence:
                deltas = first
                opened = False
                show = None if direct is None else _shown(shape, silence, direct)
                while True:
                    # The opening waits for the first delta, so that keep-alive comments may come before the
                    # opening.
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
                    deltas = await generation.next(show if opened else None)
                    if silence.due:
                        if shape.form.idle:
                            yield shape.form.idle
                        silence.sent()
            for data in await _encode_end(front, shape, generation.usage()):
                yield data
            if shape.form.end:
                yield shape.form.end
            generation.succeeded()
    except GeneratorExit:  # closed early: the client did not read the stream by the deadline
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
