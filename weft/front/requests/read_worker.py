"""Process that reads large requests for the API server: ``python -m weft.front.requests.read_worker
DESCRIPTOR``.

The process takes payloads from an inherited socket and answers each, in order, until the other end is
closed. The first payload is a ``Setup``. Every other payload is the type of a body, a zero byte, known
facts about the images and grammars, a zero byte, and the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from weft.common.errors import ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.common.workers import Answer, serve
from weft.front.protocol.messages.read_messages import read_count, read_messages
from weft.front.protocol.responses.read import read_response, read_tokens
from weft.front.requests.proofs import KnownVerdicts, NeedsProof, Unproved
from weft.front.requests.read_ollama import (
    read_ollama_chat,
    read_ollama_embed,
    read_ollama_embedding,
    read_ollama_generate,
)
from weft.front.requests.read_pooled import read_classify, read_embeddings, read_rerank, read_score
from weft.front.requests.read_sequences import read_sequences
from weft.front.requests.read_tokens import read_generate, render_chat, render_completions
from weft.front.requests.reading import Job, Reader
from weft.front.requests.setup import Setup
from weft.front.requests.tokenizing import detokenize, tokenize
from weft.media.pictures import FileToFetch, NeedsFiles
from weft.media.video_header import Header

log = get_logger(__name__)

NICENESS = 5
"""Nice value: engine steps go first if cores are scarce."""

BODY_READERS: dict[str, Callable[[Reader, bytes], Job]] = {
    "chat": Reader.chat,
    "completions": Reader.completions,
    "embeddings": read_embeddings,
    "rerank": read_rerank,
    "score": read_score,
    "classify": read_classify,
    "messages": read_messages,
    "count": read_count,
    "responses": read_response,
    "response_tokens": read_tokens,
    "generate": read_generate,
    "sequence_logprobs": read_sequences,
    "ollama_chat": read_ollama_chat,
    "ollama_generate": read_ollama_generate,
    "ollama_embed": read_ollama_embed,
    "ollama_embedding": read_ollama_embedding,
}
"""Type of a body, as passed to ``serving.handle`` -> reader. Threads of the API server and read workers use
this table.
"""

MADE: dict[str, Callable[[Reader, bytes], bytes]] = {
    "tokenize": tokenize,
    "detokenize": detokenize,
    "chat_render": render_chat,
    "completions_render": render_completions,
}
"""Type of a body -> function that returns the JSON of an answer made without the engine."""


class ReadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a read worker. Exactly one of the fields is set."""

    job: Job | None = None
    made: bytes = b""
    """JSON of the answer, if no engine is needed."""
    wanted: tuple[FileToFetch, ...] = ()
    """Files to fetch before another attempt to read."""
    unproved: Unproved | None = None
    """Grammar to compile before another attempt to read."""
    error: ErrorInfo | None = None


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a request, found by the API server after the first attempt to read."""

    files: dict[str, Header] = {}
    """URL -> header of a fetched image; name -> header of a video file."""
    names: tuple[str, ...] = ()
    """Names of LoRA adapters, accepted like the names of the model."""
    verdicts: dict[str, ErrorInfo | None] = {}
    """Digest of a grammar (``digest_of``) -> compile error; None for a grammar that compiles."""


decode_answer = msgspec.msgpack.Decoder(ReadAnswer).decode


_decode_known = msgspec.json.Decoder(Known).decode


def payload_of(body_type: str, body: Iterable[bytes], known: Known = Known()) -> tuple[bytes, ...]:
    """Return the payload to read a body, in pieces."""
    return (body_type.encode() + b"\0" + msgspec.json.encode(known) + b"\0", *body)


def read_with(reader: Reader, body_type: str, body: bytes) -> ReadAnswer:
    """Read one request. Return the job, or the JSON for a type in ``MADE``, or the missing files or the
    grammar without a verdict. Raises WeftError."""
    try:
        if body_type in MADE:
            return ReadAnswer(made=MADE[body_type](reader, body))
        return ReadAnswer(job=BODY_READERS[body_type](reader, body))
    except NeedsFiles as missing:
        return ReadAnswer(wanted=tuple(missing.wanted))
    except NeedsProof as missing:
        return ReadAnswer(unproved=missing.unproved)


def answer_to(reader: Reader, payload: bytes) -> ReadAnswer:
    """Read the request of one payload and return the answer. Every error becomes an answer; an unexpected
    exception is logged and becomes an internal error."""
    body_type, data, body = payload.split(b"\0", 2)
    try:
        known = _decode_known(data)
        knowing = reader.knowing(known.files, grammars=KnownVerdicts(known.verdicts), names=known.names)
        return read_with(knowing, body_type.decode(), body)
    except WeftError as error:
        return ReadAnswer(error=error.info())
    except Exception:
        log.exception("a request could not be read")
        return ReadAnswer(error=WeftError("the server failed to read this request").info())


def main() -> None:
    """Run a read worker: receive the ``Setup``, then answer one body after another. Returns when the other
    end is closed."""

    def prepare(greeting: bytes) -> Answer:
        """Load the text model named by the ``Setup``. Return the function that answers a payload."""
        setup = msgspec.msgpack.decode(greeting, type=Setup)
        reader = setup.reader(setup.text.load())
        encoder = msgspec.msgpack.Encoder()
        return lambda payload: (encoder.encode(answer_to(reader, payload)),)

    serve(prepare, NICENESS)


if __name__ == "__main__":
    main()
